"""MiniMax-H3."""

import torch

from .family import Family, Values, noise, positions


def minimax_h3(heads: int) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=16, hidden_size=40, num_layers=2, num_refiner_layers=1,
        ffn_dim=heads * 12, in_channels=3, audio_in_channels=5, text_dim=24, freq_dim=16, time_embed_hidden_dim=28,
        time_embed_dim=12 * heads, rope_freq_dim=2,
    )  # fmt: skip


def minimax_h3_inputs() -> Values:
    # Eleven rows: four of text, four of video (one of them at another noise level), three of audio.
    tags = torch.tensor([1] * 4 + [0] * 4 + [2] * 3)
    return dict(
        hidden_states=noise(1, 4, 12), audio_hidden_states=noise(1, 3, 5, seed=2),
        encoder_hidden_states=noise(1, 4, 24, seed=3), timestep=torch.tensor([0.25, 0.75]),
        timestep_indices=torch.tensor([0] * 7 + [1] * 4), token_tags=tags, position_ids=positions(11, 3),
        video_indices=(tags == 0).nonzero()[:, 0], audio_indices=(tags == 2).nonzero()[:, 0],
        text_indices=(tags == 1).nonzero()[:, 0],
    )  # fmt: skip


FAMILIES = [
    Family("MiniMaxH3Transformer3DModel", minimax_h3, minimax_h3_inputs, thorough=True),
]
