"""Ideogram 4."""

import torch

from .family import Family, Values, noise

TEXT, IMAGE = 3, 2


def ideogram4(heads: int) -> Values:
    return dict(
        in_channels=8, num_layers=2, attention_head_dim=12, num_attention_heads=heads, intermediate_size=heads * 10,
        adaln_dim=20, llm_features_dim=28, mrope_section=(2, 2, 2),
    )  # fmt: skip


def ideogram4_inputs() -> Values:
    # Five words and six patches; the second row holds two samples, which do not see each other.
    indicator = torch.tensor([[TEXT] * 5 + [IMAGE] * 6, [TEXT] * 2 + [IMAGE] * 4 + [TEXT] * 3 + [IMAGE] * 2])
    segments = torch.tensor([[0] * 11, [0] * 6 + [1] * 5])
    return dict(
        hidden_states=noise(2, 11, 8), encoder_hidden_states=noise(2, 11, 28, seed=2),
        timestep=torch.tensor([0.25, 0.5]), position_ids=torch.arange(66).reshape(2, 11, 3) % 7, segment_ids=segments,
        indicator=indicator,
    )  # fmt: skip


FAMILIES = [Family("Ideogram4Transformer2DModel", ideogram4, ideogram4_inputs)]
