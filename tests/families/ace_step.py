"""ACE-Step."""

import torch

from .family import Family, Values, noise


def ace_step(heads: int) -> Values:
    # A sliding window in the first block, all of the sequence in the second.
    return dict(
        hidden_size=40, intermediate_size=heads * 12, num_hidden_layers=2, num_attention_heads=2 * heads,
        num_key_value_heads=heads, head_dim=8, in_channels=16, audio_acoustic_hidden_dim=6, sliding_window=1,
        encoder_hidden_size=24,
    )  # fmt: skip


def ace_step_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 9, 6), timestep=torch.tensor([0.25, 0.5]), timestep_r=torch.tensor([0.25, 0.125]),
        encoder_hidden_states=noise(2, 5, 24, seed=2), context_latents=noise(2, 9, 10, seed=3),
    )  # fmt: skip


FAMILIES = [
    Family("AceStepTransformer1DModel", ace_step, ace_step_inputs),
]
