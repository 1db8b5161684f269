"""Hunyuan-DiT."""

import torch

from .family import Family, Values, noise


def hunyuan_dit(heads: int, activation_fn: str = "gelu-approximate") -> Values:
    # The last of four blocks is the first with a skip connection. The pooler has eight heads.
    return dict(
        num_attention_heads=heads, attention_head_dim=16, in_channels=4, patch_size=2, activation_fn=activation_fn,
        sample_size=8, hidden_size=heads * 16, num_layers=4, mlp_ratio=3.0, cross_attention_dim=24,
        cross_attention_dim_t5=40, pooled_projection_dim=20, text_len=5, text_len_t5=4,
    )  # fmt: skip


def gated(heads: int) -> Values:
    return hunyuan_dit(heads, "geglu")


def hunyuan_dit_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 4, 4, 6), timestep=torch.tensor([300.0, 700.0]),
        encoder_hidden_states=noise(2, 5, 24, seed=2), text_embedding_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
        encoder_hidden_states_t5=noise(2, 4, 40, seed=3),
        text_embedding_mask_t5=torch.tensor([[1] * 4, [1] * 2 + [0] * 2]),
        image_meta_size=torch.tensor([[32.0, 48.0, 32.0, 48.0, 0.0, 0.0]] * 2), style=torch.tensor([0, 0]),
        image_rotary_emb=(noise(6, 16, seed=4).cos(), noise(6, 16, seed=4).sin()),
    )  # fmt: skip


FAMILIES = [
    Family("HunyuanDiT2DModel", hunyuan_dit, hunyuan_dit_inputs, variant="plain MLP"),
    Family("HunyuanDiT2DModel", gated, hunyuan_dit_inputs, variant="gated MLP"),
]
