"""Krea 2."""

import torch

from .family import Family, Values, noise, positions


def krea2(heads: int) -> Values:
    # Twice as many heads of queries as of keys and values, so that both divide by `heads`.
    return dict(
        in_channels=8, num_layers=1, attention_head_dim=12, num_attention_heads=2 * heads, num_key_value_heads=heads,
        intermediate_size=heads * 10, timestep_embed_dim=20, text_hidden_dim=heads * 16, num_text_layers=3,
        text_num_attention_heads=2 * heads, text_num_key_value_heads=heads, text_intermediate_size=heads * 9,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 4, 4),
    )  # fmt: skip


def krea2_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 3, 64, seed=2),
        timestep=torch.tensor([0.25, 0.5]), position_ids=torch.cat([torch.zeros(5, 3), positions(6, 3)]),
        encoder_attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )  # fmt: skip


FAMILIES = [Family("Krea2Transformer2DModel", krea2, krea2_inputs)]
