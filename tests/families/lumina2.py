"""Lumina-Image 2.0."""

import torch

from .family import Family, Values, noise


def lumina2(heads: int) -> Values:
    return dict(
        sample_size=8, in_channels=4, hidden_size=2 * heads * 12, num_layers=2, num_refiner_layers=1,
        num_attention_heads=2 * heads, num_kv_heads=heads, multiple_of=8, ffn_dim_multiplier=0.75,
        axes_dim_rope=(4, 4, 4), axes_lens=(16, 16, 16), cap_feat_dim=24,
    )  # fmt: skip


def lumina2_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 4, 4, 6), timestep=torch.tensor([0.25, 0.5]),
        encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
    )  # fmt: skip


FAMILIES = [
    Family("Lumina2Transformer2DModel", lumina2, lumina2_inputs),
]
