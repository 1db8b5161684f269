"""FLUX.1."""

import torch

from .family import Family, Values, noise, positions


def flux(heads: int) -> Values:
    return dict(
        num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=heads, in_channels=8,
        joint_attention_dim=24, pooled_projection_dim=20, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def flux_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), pooled_projections=noise(2, 20),
        timestep=torch.tensor([0.25, 0.5]), guidance=torch.tensor([4.0, 4.0]), img_ids=positions(6, 3),
        txt_ids=positions(5, 3),
    )  # fmt: skip


FAMILIES = [
    Family("FluxTransformer2DModel", flux, flux_inputs, thorough=True),
    Family(
        "FluxTransformer2DModel",
        flux,
        flux_inputs,
        variant="fused",
        dead=r"attn\.(to_[qkv]|add_[qkv]_proj)\.",
        fused=True,
    ),
]
