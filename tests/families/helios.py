"""Helios, with and without a scale of the history's keys, all three histories before the frames."""

import torch

from .family import Family, Values, noise


def helios(heads: int) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=6, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=heads * 10, num_layers=2, rope_dim=(4, 4, 4),
    )  # fmt: skip


def by_head(heads: int) -> Values:
    return helios(heads) | dict(is_amplify_history=True)


def one_scale(heads: int) -> Values:
    return by_head(heads) | dict(history_scale_mode="scalar", guidance_cross_attn=False, zero_history_timestep=False)


def with_image_keys(heads: int) -> Values:
    return helios(heads) | dict(added_kv_proj_dim=20)


def inputs() -> Values:
    def frames(first: int, last: int) -> torch.Tensor:
        return torch.arange(first, last).repeat(2, 1)

    return dict(
        hidden_states=noise(2, 6, 2, 4, 8), timestep=torch.tensor([300, 700]),
        encoder_hidden_states=noise(2, 5, 24, seed=2), indices_hidden_states=frames(7, 9),
        indices_latents_history_short=frames(6, 7), latents_history_short=noise(2, 6, 1, 4, 8, seed=3),
        indices_latents_history_mid=frames(4, 6), latents_history_mid=noise(2, 6, 2, 4, 8, seed=4),
        indices_latents_history_long=frames(0, 4), latents_history_long=noise(2, 6, 4, 4, 8, seed=5),
    )  # fmt: skip


FAMILIES = [
    Family("HeliosTransformer3DModel", helios, inputs, "as published"),
    Family("HeliosTransformer3DModel", by_head, inputs, "a scale for each head"),
    Family("HeliosTransformer3DModel", one_scale, inputs, "one scale"),
    Family("HeliosTransformer3DModel", with_image_keys, inputs, "image keys", dead=r"add_[kv]_proj|norm_added_k"),
]
