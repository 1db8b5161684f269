"""EasyAnimate."""

from typing import Any

import torch

from .family import Family, Values, noise


def easyanimate(heads: int, **different: Any) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=16, in_channels=4, out_channels=4, patch_size=2, num_layers=2,
        mmdit_layers=2, time_embed_dim=20, text_embed_dim=24, text_embed_dim_t5=22, **different,
    )  # fmt: skip


def gated(heads: int) -> Values:
    return easyanimate(heads, activation_fn="swiglu", after_norm=True)


def easyanimate_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 4, 2, 4, 6), timestep=torch.tensor([300, 700]),
        encoder_hidden_states=noise(2, 5, 24, seed=2), encoder_hidden_states_t5=noise(2, 3, 22, seed=3),
    )  # fmt: skip


# The text ends in the last block.
DEAD = r"blocks\.1\.(attn1\.(add_q|to_add)|txt_ff)"
FAMILIES = [
    Family("EasyAnimateTransformer3DModel", easyanimate, easyanimate_inputs, variant="plain MLP", dead=DEAD),
    Family("EasyAnimateTransformer3DModel", gated, easyanimate_inputs, variant="gated MLP", dead=DEAD),
]
