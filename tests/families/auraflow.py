"""AuraFlow."""

import torch

from .family import Family, Values, noise


def auraflow(heads: int) -> Values:
    return dict(
        sample_size=8, in_channels=4, out_channels=4, num_mmdit_layers=1, num_single_dit_layers=2,
        attention_head_dim=16, num_attention_heads=heads, joint_attention_dim=24, caption_projection_dim=heads * 16,
        pos_embed_max_size=36,
    )  # fmt: skip


def auraflow_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 4, 4, 6), encoder_hidden_states=noise(2, 5, 24, seed=2),
        timestep=torch.tensor([0.25, 0.5]),
    )  # fmt: skip


FAMILIES = [
    Family("AuraFlowTransformer2DModel", auraflow, auraflow_inputs),
]
