"""Stable Audio Open and Stable Audio 3."""

import torch

from .family import Family, Values, noise


def stable_audio(heads: int) -> Values:
    return dict(
        in_channels=6, out_channels=6, num_layers=2, attention_head_dim=8, num_attention_heads=2 * heads,
        num_key_value_attention_heads=heads, cross_attention_dim=24, time_proj_dim=12, global_states_input_dim=22,
        cross_attention_input_dim=20,
    )  # fmt: skip


def stable_audio_inputs() -> Values:
    # Half of each head is rotated; the global state is one more token.
    return dict(
        hidden_states=noise(2, 6, 7), timestep=torch.tensor([0.25, 0.5]), encoder_hidden_states=noise(2, 5, 20, seed=2),
        global_hidden_states=noise(2, 1, 22, seed=3),
        rotary_embedding=(noise(8, 4, seed=4).cos(), noise(8, 4, seed=4).sin()),
        attention_mask=torch.tensor([[True] * 7, [True] * 6 + [False]]),
        encoder_attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )  # fmt: skip


def stable_audio3(heads: int, differential: bool = True) -> Values:
    return dict(
        io_channels=6, embed_dim=heads * 16, depth=2, num_heads=heads, cond_token_dim=20, global_cond_dim=22,
        local_add_cond_dim=10, timestep_features_dim=12, ff_mult=3.0, num_memory_tokens=3,
        use_differential_attention=differential,
    )  # fmt: skip


def plain(heads: int) -> Values:
    return stable_audio3(heads, differential=False)


def stable_audio3_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 7), timestep=torch.tensor([0.25, 0.5]), encoder_hidden_states=noise(2, 5, 20, seed=2),
        global_hidden_states=noise(2, 22, seed=3), local_add_cond=noise(2, 10, 7, seed=4),
        encoder_attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )  # fmt: skip


FAMILIES = [
    Family("StableAudioDiTModel", stable_audio, stable_audio_inputs),
    Family("StableAudio3DiTModel", stable_audio3, stable_audio3_inputs, variant="differential"),
    Family("StableAudio3DiTModel", plain, stable_audio3_inputs, variant="plain"),
]
