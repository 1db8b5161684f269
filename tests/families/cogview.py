"""CogView3-Plus and CogView4, the latter with its padded tokens masked."""

import torch

from .family import Family, Values, noise


def cogview3(heads: int) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=3, out_channels=5, num_layers=2,
        text_embed_dim=20, time_embed_dim=10, condition_dim=6, pos_embed_max_size=4, sample_size=8,
    )  # fmt: skip


def cogview4(heads: int) -> Values:
    return cogview3(heads) | dict(rope_axes_dim=(8, 8))


def inputs() -> Values:
    sizes = {name: torch.tensor([[8.0, 6.0]] * 2) for name in ("original_size", "target_size", "crop_coords")}
    return sizes | dict(
        hidden_states=noise(2, 3, 4, 6),
        encoder_hidden_states=noise(2, 5, 20, seed=2),
        timestep=torch.tensor([300, 700]),
    )


def masked_inputs() -> Values:
    return inputs() | dict(attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]))


FAMILIES = [
    Family("CogView3PlusTransformer2DModel", cogview3, inputs),
    Family("CogView4Transformer2DModel", cogview4, masked_inputs),
]
