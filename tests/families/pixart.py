"""PixArt, with the conditions of alpha, and with a gated activation."""

import torch

from .family import Family, Values, noise


def pixart(heads: int) -> Values:
    # No biases in attention: with nothing between k and the softmax, the output would not depend on those of k.
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=3, out_channels=5, num_layers=2, sample_size=8,
        cross_attention_dim=heads * 12, caption_channels=20, use_additional_conditions=True, attention_bias=False,
    )  # fmt: skip


def gated(heads: int) -> Values:
    return pixart(heads) | dict(activation_fn="geglu")


def inputs() -> Values:
    return dict(
        hidden_states=noise(2, 3, 8, 6), encoder_hidden_states=noise(2, 5, 20, seed=2),
        timestep=torch.tensor([300, 700]), encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
        added_cond_kwargs={
            "resolution": torch.tensor([[8.0, 6.0]] * 2), "aspect_ratio": torch.tensor([[1.25], [0.75]])
        },
    )  # fmt: skip


FAMILIES = [
    Family("PixArtTransformer2DModel", pixart, inputs, "not gated"),
    Family("PixArtTransformer2DModel", gated, inputs, "gated"),
]
