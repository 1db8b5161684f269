"""LTX-Video."""

import torch

from .family import Family, Values, noise


def ltx(heads: int) -> Values:
    return dict(
        in_channels=8, out_channels=8, num_attention_heads=heads, attention_head_dim=16, cross_attention_dim=heads * 16,
        num_layers=2, caption_channels=24,
    )  # fmt: skip


def ltx_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), timestep=torch.tensor([300, 700]),
        encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]), num_frames=1, height=2, width=3,
    )  # fmt: skip


FAMILIES = [
    Family("LTXVideoTransformer3DModel", ltx, ltx_inputs, thorough=True),
]
