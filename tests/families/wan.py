"""Wan: text, image and text-or-image to video, VACE, Animate, Animate 2, and ChronoEdit."""

from typing import Any
from unittest.mock import patch

import diffusers
import torch
from diffusers.models.transformers import transformer_wan_animate_2 as animate_2
from torch.nn.attention.flex_attention import create_block_mask

from .family import Family, Values, noise

# Where a model attends to an image too, it takes the last 512 tokens for the text.
TEXT = 512


def wan(heads: int) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=6, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=heads * 10, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip


def with_image(heads: int) -> Values:
    return wan(heads) | dict(image_dim=20, added_kv_proj_dim=heads * 12)


def inputs(text: int = 5, frames: int = 2) -> Values:
    return dict(
        hidden_states=noise(2, 6, frames, 4, 6), timestep=torch.tensor([300, 700]),
        encoder_hidden_states=noise(2, text, 24, seed=2),
    )  # fmt: skip


def image_inputs() -> Values:
    return inputs(TEXT) | dict(encoder_hidden_states_image=noise(2, 3, 20, seed=3))


def inputs_by_token() -> Values:
    # A time for each of the 2 x 2 x 3 tokens: those of the given frame are at 0.
    return inputs() | dict(timestep=torch.tensor([[0] * 6 + [700] * 6] * 2))


def vace(heads: int) -> Values:
    return with_image(heads) | dict(num_layers=3, vace_layers=[0, 2], vace_in_channels=5)


def vace_inputs() -> Values:
    return image_inputs() | dict(
        control_hidden_states=noise(2, 5, 2, 4, 6, seed=4), control_hidden_states_scale=torch.tensor([1.0, 0.75])
    )


def animate(heads: int) -> Values:
    return with_image(heads) | dict(
        in_channels=12, latent_channels=4, motion_encoder_channel_sizes={"4": 6, "8": 6, "16": 6},
        motion_encoder_size=16, motion_style_dim=10, motion_dim=3, motion_encoder_dim=14, face_encoder_hidden_dim=18,
        face_encoder_num_heads=2, inject_face_latents_blocks=1,
    )  # fmt: skip


def animate_inputs() -> Values:
    # Five frames of a face become two, and a first one of zeros: as many as there are frames of latents.
    return image_inputs() | dict(
        hidden_states=noise(2, 12, 3, 4, 6), pose_hidden_states=noise(2, 4, 2, 4, 6, seed=4),
        face_pixel_values=noise(2, 3, 5, 16, 16, seed=5),
    )  # fmt: skip


def uncompiled(*args: Any, _compile: bool, **kwargs: Any) -> Any:
    """A block mask, which takes half a minute to compile."""
    return create_block_mask(*args, **kwargs)


class Animate2(diffusers.WanAnimate2Transformer3DModel):
    """Takes up a reference of two frames, then denoises three frames that attend to its keys and values."""

    def forward(self, latents: list[list[torch.Tensor]], conditions: list[list[torch.Tensor]], **kwargs: Any) -> Any:
        cache, grid = animate_2.WanAnimate2KVCache(len(self.blocks)), torch.tensor([[2, 2, 3]])
        first = super().forward(
            latents[0], condition_latents=conditions[0], kv_cache=cache, kv_cache_mode="extract", seq_len=12,
            offset_grid_sizes=grid, **kwargs,
        )  # fmt: skip
        with patch.object(animate_2, "create_block_mask", uncompiled):
            second = super().forward(
                latents[1], condition_latents=conditions[1], kv_cache=cache, kv_cache_mode="cached", seq_len=18,
                reference_grid_sizes=grid, origin_len=5, origin_area=[32, 48], **kwargs,
            )  # fmt: skip
        return first, second


def animate2(heads: int) -> Values:
    return dict(
        in_dim=6, dim=heads * 12, ffn_dim=heads * 10, freq_dim=16, text_dim=24, out_dim=4, num_heads=heads, num_layers=2
    )


def animate2_inputs() -> Values:
    return dict(
        latents=[[noise(4, 2, 4, 6)], [noise(4, 3, 4, 6, seed=2)]], timestep=torch.tensor([700]),
        conditions=[[noise(2, 2, 4, 6, seed=3)], [noise(2, 3, 4, 6, seed=4)]],
        encoder_hidden_states=[noise(5, 24, seed=5)], encoder_hidden_states_image=noise(1, 3, 1280, seed=6),
    )  # fmt: skip


FAMILIES = [
    Family("WanTransformer3DModel", wan, inputs, "text to video"),
    Family("WanTransformer3DModel", with_image, image_inputs, "image to video"),
    Family("WanTransformer3DModel", wan, inputs_by_token, "a time for each token"),
    Family("WanVACETransformer3DModel", vace, vace_inputs),
    Family("WanAnimateTransformer3DModel", animate, animate_inputs),
    Family("WanAnimate2Transformer3DModel", animate2, animate2_inputs, model=Animate2),
    Family("ChronoEditTransformer3DModel", with_image, image_inputs),
]
