"""Latte, gated as by default and not."""

import torch

from .family import Family, Values, noise


def gated(heads: int) -> Values:
    # No biases in attention: with nothing between k and the softmax, the output would not depend on those of k.
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=3, out_channels=5, num_layers=2, sample_size=4,
        patch_size=2, cross_attention_dim=heads * 12, caption_channels=20, norm_type="ada_norm_single",
        norm_elementwise_affine=False, attention_bias=False, video_length=3,
    )  # fmt: skip


def plain(heads: int) -> Values:
    return gated(heads) | dict(activation_fn="gelu-approximate")


def inputs() -> Values:
    return dict(
        hidden_states=noise(2, 3, 3, 4, 4), encoder_hidden_states=noise(2, 5, 20, seed=2),
        timestep=torch.tensor([300, 700]),
    )  # fmt: skip


FAMILIES = [
    Family("LatteTransformer3DModel", gated, inputs, "gated"),
    Family("LatteTransformer3DModel", plain, inputs, "not gated"),
]
