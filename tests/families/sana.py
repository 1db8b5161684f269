"""Sana without norms of q and k, Sprint with them and guidance, and SANA-Video."""

import torch

from .family import Family, Values, noise


def sana(heads: int) -> Values:
    # Twice as many heads for self-attention as for cross-attention.
    return dict(
        in_channels=3, out_channels=5, num_attention_heads=2 * heads, attention_head_dim=8, num_layers=2,
        num_cross_attention_heads=heads, cross_attention_head_dim=12, cross_attention_dim=16 * heads,
        caption_channels=24, sample_size=4, interpolation_scale=1,
    )  # fmt: skip


def sprint(heads: int) -> Values:
    return dict(sana(heads), qk_norm="rms_norm_across_heads", guidance_embeds=True, attention_bias=True, patch_size=2)


def sana_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 3, 4, 6), encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]), timestep=torch.tensor([250, 500]),
    )  # fmt: skip


def sprint_inputs() -> Values:
    return dict(sana_inputs(), guidance=torch.tensor([0.25, 0.5]))


def sana_video(heads: int) -> Values:
    return dict(
        in_channels=3, out_channels=5, num_attention_heads=heads, attention_head_dim=12, num_layers=2,
        num_cross_attention_heads=2 * heads, cross_attention_head_dim=8, cross_attention_dim=12 * heads,
        caption_channels=24, mlp_ratio=3.0, sample_size=4, patch_size=(1, 1, 2), rope_max_seq_len=16,
    )  # fmt: skip


def sana_video_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 3, 3, 2, 4), encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]), timestep=torch.tensor([250, 500]),
    )  # fmt: skip


FAMILIES = [
    Family("SanaTransformer2DModel", sana, sana_inputs, cancelled=r"attn2\.to_k\.bias"),
    Family("SanaTransformer2DModel", sprint, sprint_inputs, variant="Sprint"),
    Family("SanaVideoTransformer3DModel", sana_video, sana_video_inputs),
]
