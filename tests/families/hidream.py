"""HiDream: with experts, and without."""

import torch

from .family import Family, Values, noise


def hidream(heads: int) -> Values:
    # A layer of text for each of three blocks.
    return dict(
        patch_size=2, in_channels=3, num_layers=1, num_single_layers=2, num_attention_heads=heads,
        attention_head_dim=16, caption_channels=[20, 24], text_emb_dim=28, num_routed_experts=4,
        num_activated_experts=2, axes_dims_rope=(8, 4, 4), max_resolution=(8, 8), llama_layers=[0, 2, 1],
    )  # fmt: skip


def without_experts(heads: int) -> Values:
    return dict(hidream(heads), num_routed_experts=0, num_single_layers=1, llama_layers=[0, 2])


def hidream_inputs() -> Values:
    # Not square, so that the latents are padded to 16 tokens under a mask.
    return dict(
        hidden_states=noise(2, 3, 4, 6), timesteps=torch.tensor([250, 500]), pooled_embeds=noise(2, 28, seed=2),
        encoder_hidden_states_t5=noise(2, 3, 20, seed=3), encoder_hidden_states_llama3=noise(3, 2, 5, 24, seed=4),
    )  # fmt: skip


FAMILIES = [
    Family("HiDreamImageTransformer2DModel", hidream, hidream_inputs),
    Family("HiDreamImageTransformer2DModel", without_experts, hidream_inputs, variant="without experts"),
]
