"""ERNIE-Image."""

import torch

from .family import Family, Values, noise


def ernie(heads: int) -> Values:
    return dict(
        hidden_size=heads * 12, num_attention_heads=heads, num_layers=2, ffn_hidden_size=heads * 10, in_channels=8,
        out_channels=8, text_in_dim=24, rope_axes_dim=(4, 4, 4),
    )  # fmt: skip


def ernie_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 8, 2, 3), timestep=torch.tensor([250.0, 500.0]), text_bth=noise(2, 5, 24, seed=2),
        text_lens=torch.tensor([5, 3]),
    )  # fmt: skip


FAMILIES = [Family("ErnieImageTransformer2DModel", ernie, ernie_inputs)]
