"""Stable Diffusion 3 and 3.5."""

from typing import Any

import torch

from .family import Family, Values, noise


def sd3(heads: int, **different: Any) -> Values:
    return dict(
        sample_size=8, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=24, caption_projection_dim=heads * 16, pooled_projection_dim=20, pos_embed_max_size=10,
        **different,
    )  # fmt: skip


def sd35(heads: int) -> Values:
    return sd3(heads, qk_norm="rms_norm")


def sd35_dual(heads: int) -> Values:
    return sd3(heads, qk_norm="rms_norm", dual_attention_layers=(0,))


def sd3_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 4, 4, 6), encoder_hidden_states=noise(2, 5, 24, seed=2), pooled_projections=noise(2, 20),
        timestep=torch.tensor([300, 700]),
    )  # fmt: skip


NAME = "SD3Transformer2DModel"
# In the last block the text only gives keys and values.
DEAD = r"blocks\.1\.attn\.add_q"
FAMILIES = [
    Family(NAME, sd3, sd3_inputs, variant="without q and k norms", dead=DEAD),
    Family(NAME, sd35, sd3_inputs, variant="with q and k norms", dead=DEAD),
    Family(NAME, sd35_dual, sd3_inputs, variant="with two attentions", dead=DEAD),
]
