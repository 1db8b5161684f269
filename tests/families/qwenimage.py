"""Qwen-Image and Qwen-Image 2.1."""

import torch

from .family import Family, Values, noise


def qwenimage(heads: int) -> Values:
    return dict(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def qwenimage_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 16), encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_hidden_states_mask=torch.ones(2, 5, dtype=torch.long), timestep=torch.tensor([0.25, 0.5]),
        img_shapes=[[(1, 2, 3)]] * 2,
    )  # fmt: skip


def qwenimage21(heads: int) -> Values:
    return dict(
        in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=heads,
        context_in_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def qwenimage21_inputs() -> Values:
    # Three text tokens, then one slot that stands for the 2 x 2 latent tokens of the image.
    return dict(
        hidden_states=noise(2, 4, 8), encoder_hidden_states=noise(2, 3, 24, seed=2), timestep=torch.tensor([0.5]),
        img_shapes=[[(1, 2, 2)]] * 2, img_mask=torch.tensor([[False, False, False, True]] * 2),
    )  # fmt: skip


FAMILIES = [
    Family(
        "QwenImageTransformer2DModel",
        qwenimage,
        qwenimage_inputs,
        dead=r"blocks\.1\.(attn\.(add_q|to_add)|txt_mlp)",
        thorough=True,
    ),
    Family("QwenImage21Transformer2DModel", qwenimage21, qwenimage21_inputs, thorough=True),
]
