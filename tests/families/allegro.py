"""Allegro."""

import torch

from .family import Family, Values, noise


def allegro(heads: int) -> Values:
    # No biases in attention: with nothing between k and the softmax, the output would not depend on those of k.
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=3, out_channels=3, num_layers=2,
        cross_attention_dim=heads * 12, caption_channels=20, sample_height=4, sample_width=6, sample_frames=2,
        attention_bias=False,
    )  # fmt: skip


def inputs() -> Values:
    # Tables and positions of 2 x 2 x 3 tokens along three axes, of four channels each; one frame is masked.
    angles, grid = noise(3, 3, 4, seed=3), torch.meshgrid(*map(torch.arange, (2, 2, 3)), indexing="ij")
    return dict(
        hidden_states=noise(2, 3, 2, 4, 6), encoder_hidden_states=noise(2, 5, 20, seed=2),
        timestep=torch.tensor([300, 700]), encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
        attention_mask=torch.tensor([[1.0, 1.0], [1.0, 0.0]]).view(2, 2, 1, 1).repeat(1, 1, 4, 6), image_rotary_emb=(
            [(axis.cos(), axis.sin()) for axis in angles], [axis.flatten()[None].repeat(2, 1) for axis in grid]
        ),
    )  # fmt: skip


FAMILIES = [Family("AllegroTransformer3DModel", allegro, inputs)]
