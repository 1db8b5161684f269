"""Motif-Video."""

import torch

from .family import Family, Values, noise


def motif_video(heads: int) -> Values:
    # The second single block is the decoder.
    return dict(
        in_channels=5, out_channels=4, num_attention_heads=heads, attention_head_dim=16, num_layers=1,
        num_single_layers=2, num_decoder_layers=1, mlp_ratio=3.0, text_embed_dim=24, image_embed_dim=18,
        rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def cross(heads: int) -> Values:
    return dict(motif_video(heads), enable_text_cross_attention_dual=True)


def motif_video_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 5, 2, 4, 6), timestep=torch.tensor([300, 700]),
        encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]), image_embeds=noise(2, 3, 18, seed=3),
    )  # fmt: skip


FAMILIES = [
    Family("MotifVideoTransformer3DModel", motif_video, motif_video_inputs, variant="self-attention"),
    Family("MotifVideoTransformer3DModel", cross, motif_video_inputs, variant="with cross-attention"),
]
