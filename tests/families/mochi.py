"""Mochi 1."""

import torch

from .family import Family, Values, noise


def mochi(heads: int) -> Values:
    # The MLPs are 8 / 3 as wide as the streams.
    return dict(
        num_attention_heads=heads, attention_head_dim=12, num_layers=2, pooled_projection_dim=heads * 6, in_channels=3,
        text_embed_dim=32, time_embed_dim=10, max_sequence_length=5,
    )  # fmt: skip


def inputs() -> Values:
    return dict(
        hidden_states=noise(2, 3, 2, 4, 6), encoder_hidden_states=noise(2, 5, 32, seed=2),
        timestep=torch.tensor([300, 700]),
        encoder_attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )  # fmt: skip


FAMILIES = [Family("MochiTransformer3DModel", mochi, inputs, dead=r"blocks\.1\.attn1\.add_q_proj")]
