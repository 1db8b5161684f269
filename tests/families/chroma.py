"""Chroma."""

import torch

from .family import Family, Values, noise, positions


def chroma(heads: int) -> Values:
    return dict(
        num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=heads, in_channels=8,
        joint_attention_dim=24, axes_dims_rope=(4, 4, 8), approximator_num_channels=16,
        approximator_hidden_dim=heads * 10, approximator_layers=2,
    )  # fmt: skip


def chroma_inputs() -> Values:
    # The mask covers text and image; two tokens of the second text are padding.
    mask = torch.ones(2, 11, dtype=torch.bool)
    mask[1, 3:5] = False
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), timestep=torch.tensor([0.25, 0.5]),
        img_ids=positions(6, 3), txt_ids=positions(5, 3), attention_mask=mask,
    )  # fmt: skip


FAMILIES = [Family("ChromaTransformer2DModel", chroma, chroma_inputs)]
