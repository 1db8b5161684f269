"""Ovis-Image."""

import torch

from .family import Family, Values, noise, positions


def ovis(heads: int) -> Values:
    return dict(
        num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=heads, in_channels=8,
        out_channels=8, joint_attention_dim=24, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def ovis_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), timestep=torch.tensor([0.25, 0.5]),
        img_ids=positions(6, 3), txt_ids=positions(5, 3),
    )  # fmt: skip


FAMILIES = [Family("OvisImageTransformer2DModel", ovis, ovis_inputs)]
