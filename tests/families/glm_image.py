"""GLM-Image: one image made with the keys and values of another."""

from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache

from .family import Family, Values, noise


class Edit(diffusers.GlmImageTransformer2DModel):
    """Writes an image into a cache, then denoises another that reads it."""

    def forward(self, images: list[torch.Tensor], **kwargs: Any) -> Any:
        cache = GlmImageKVCache(len(self.transformer_blocks))
        for image, mode in zip(images, ("write", "read"), strict=True):
            cache.set_mode(mode)
            output = super().forward(image, kv_caches=cache, **kwargs)
        return output


def glm_image(heads: int) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=3, out_channels=5, num_layers=2,
        text_embed_dim=20, time_embed_dim=10, condition_dim=6, prior_vq_quantizer_codebook_size=7,
    )  # fmt: skip


def inputs() -> Values:
    return dict(
        images=[noise(2, 3, 4, 6), noise(2, 3, 4, 6, seed=2)], encoder_hidden_states=noise(2, 5, 20, seed=3),
        prior_token_id=torch.tensor([[0, 1, 2, 3, 4, 5], [6, 5, 4, 3, 2, 1]]),
        prior_token_drop=torch.tensor([[False] * 6, [True] * 6]), timestep=torch.tensor([300, 700]),
        target_size=torch.tensor([[8.0, 6.0]] * 2), crop_coords=torch.tensor([[0.0, 1.0]] * 2),
    )  # fmt: skip


FAMILIES = [Family("GlmImageTransformer2DModel", glm_image, inputs, model=Edit)]
