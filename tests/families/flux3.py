"""FLUX.3."""

import torch

from .family import Family, Values, noise, positions


def flux3(heads: int) -> Values:
    return dict(
        in_channels=8, cond_in_channels=10, num_layers=1, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=heads, joint_attention_dim=24, timestep_channels=32, axes_dims_rope=(4, 4, 4, 4),
        flow_map=True,
    )  # fmt: skip


def flux3_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), timestep=torch.tensor([0.25, 0.5]),
        target_timestep=torch.tensor([0.125, 0.25]), img_ids=positions(6, 4), txt_ids=positions(5, 4),
        image_cond_hidden_states=noise(2, 4, 10, seed=3), image_cond_ids=positions(4, 4),
    )  # fmt: skip


FAMILIES = [
    Family("Flux3Transformer2DModel", flux3, flux3_inputs),
    Family("Flux3Transformer2DModel", flux3, flux3_inputs, variant="fused", fused=True, dead=r"attn\.to_[qkv]\."),
]
