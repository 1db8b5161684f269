"""Nucleus-Image: a block with one MLP, and blocks with experts, in a loop and in a grouped product."""

import torch

from .family import Family, Values, noise


def nucleus(heads: int) -> Values:
    return dict(
        patch_size=2, in_channels=12, out_channels=3, num_layers=3, attention_head_dim=8, num_attention_heads=2 * heads,
        num_key_value_heads=heads, joint_attention_dim=20, axes_dims_rope=(4, 2, 2),
        dense_moe_strategy="leave_first_block_dense", num_experts=3, moe_intermediate_dim=12 * heads,
        capacity_factors=[1.0, 1.5, 2.0],
    )  # fmt: skip


def grouped(heads: int) -> Values:
    return dict(nucleus(heads), use_grouped_mm=True, use_sigmoid=True, num_layers=2, capacity_factors=2.0)


def nucleus_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 12), img_shapes=[(1, 2, 3)] * 2, encoder_hidden_states=noise(2, 5, 20, seed=2),
        encoder_hidden_states_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]), timestep=torch.tensor([0.25, 0.5]),
    )  # fmt: skip


FAMILIES = [
    Family("NucleusMoEImageTransformer2DModel", nucleus, nucleus_inputs),
    Family("NucleusMoEImageTransformer2DModel", grouped, nucleus_inputs, variant="grouped"),
]
