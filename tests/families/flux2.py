"""FLUX.2."""

import torch

from .family import Family, Values, noise, positions


def flux2(heads: int) -> Values:
    return dict(
        in_channels=8, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=24, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip


def flux2_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), timestep=torch.tensor([0.25, 0.5]),
        guidance=torch.tensor([4.0, 4.0]), img_ids=positions(6, 4), txt_ids=positions(5, 4),
    )  # fmt: skip


FAMILIES = [
    Family("Flux2Transformer2DModel", flux2, flux2_inputs, thorough=True),
]
