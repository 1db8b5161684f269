"""Kandinsky 5 and Kandinsky 6."""

import torch

from .family import Family, Values, noise


def kandinsky5(heads: int) -> Values:
    # One block of each kind: Kandinsky 5 rounds its rotated queries and keys to bfloat16, where the last bit of a
    # second block's input would show.
    return dict(
        in_visual_dim=3, out_visual_dim=3, in_text_dim=24, in_text_dim2=20, time_dim=28, model_dim=heads * 12,
        ff_dim=heads * 10, num_text_blocks=1, num_visual_blocks=1, axes_dims=(4, 4, 4), visual_cond=True,
    )  # fmt: skip


def kandinsky5_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 1, 4, 6, 7), encoder_hidden_states=noise(2, 5, 24, seed=2),
        timestep=torch.tensor([250.0, 500.0]), pooled_projections=noise(2, 20, seed=3),
        visual_rope_pos=[torch.arange(1), torch.arange(2), torch.arange(3)], text_rope_pos=torch.arange(5),
    )  # fmt: skip


def kandinsky6(heads: int) -> Values:
    # As released: the two modalities have other widths, here with twice as many heads for video as for audio.
    return dict(
        in_visual_dim=3, out_visual_dim=3, in_text_dim=24, in_text_dim2=20, time_dim=28, model_dim=heads * 24,
        ff_dim=heads * 10, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 4, 4), in_audio_dim=5, out_audio_dim=6,
        model_dim_a=heads * 12, time_dim_a=32, ff_dim_a=heads * 9, audio_freqs_scaling=0.5, ca_rope=True,
        cross_gates=True, fix_modulation=True, visual_token_type_num_embeddings=2,
    )  # fmt: skip


def kandinsky6_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 2, 4, 4, 7), encoder_hidden_states=noise(2, 5, 24, seed=2),
        timestep=torch.tensor([250.0, 500.0]), pooled_projections=noise(2, 20, seed=3),
        audio_hidden_states=noise(2, 4, 5, seed=4), visual_token_type_ids=torch.tensor([[0, 1], [0, 0]]),
        encoder_attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )  # fmt: skip


FAMILIES = [
    Family("Kandinsky5Transformer3DModel", kandinsky5, kandinsky5_inputs),
    Family("Kandinsky6Transformer3DModel", kandinsky6, kandinsky6_inputs),
]
