"""JoyImage-Edit and JoyImage-Edit-Plus."""

import torch

from .family import Family, Values, noise

# Nothing reads the last block's text.
LAST_TEXT = r"double_blocks\.1\.(attn\.txt_attn_proj|txt_mlp)"


def joyimage(heads: int) -> Values:
    return dict(
        in_channels=3, hidden_size=heads * 16, num_attention_heads=heads, text_dim=24, mlp_width_ratio=2.5,
        num_layers=2, rope_dim_list=[4, 4, 8], rope_type="mrope",
    )  # fmt: skip


def edit_inputs() -> Values:
    # Two images of 2 x 2 patches each.
    return dict(
        hidden_states=noise(2, 2, 3, 1, 4, 4), encoder_hidden_states=noise(2, 5, 24, seed=2),
        timestep=torch.tensor([250.0, 500.0]),
    )  # fmt: skip


def edit_plus_inputs() -> Values:
    # Seven patches of a target and two references; the second sample has one reference less, and a shorter text.
    return dict(
        hidden_states=noise(2, 7, 3, 1, 2, 2), encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_hidden_states_mask=torch.tensor([[1.0] * 5, [1.0] * 3 + [0.0] * 2]),
        timestep=torch.tensor([250.0, 500.0]), shape_list=[[(1, 2, 2), (1, 1, 2), (1, 1, 1)], [(1, 2, 2), (1, 1, 2)]],
    )  # fmt: skip


FAMILIES = [
    Family("JoyImageEditTransformer3DModel", joyimage, edit_inputs, dead=LAST_TEXT),
    Family("JoyImageEditPlusTransformer3DModel", joyimage, edit_plus_inputs, dead=LAST_TEXT),
]
