"""SkyReels V2: image to video; and diffusion forcing, with a time for each frame, causal in blocks of two frames."""

import torch

from .family import Family, Values, noise

TEXT = 512  # Where a model attends to an image too, it takes the last 512 tokens for the text.


def skyreels(heads: int) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=6, out_channels=4, text_dim=24, freq_dim=16,
        ffn_dim=heads * 10, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip


def image_to_video(heads: int) -> Values:
    return skyreels(heads) | dict(image_dim=20, added_kv_proj_dim=heads * 12)


def forcing(heads: int) -> Values:
    return skyreels(heads) | dict(inject_sample_info=True, num_frame_per_block=2)


def image_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 4, 4, 6), timestep=torch.tensor([300, 700]),
        encoder_hidden_states=noise(2, TEXT, 24, seed=2), encoder_hidden_states_image=noise(2, 3, 20, seed=3),
    )  # fmt: skip


def forcing_inputs() -> Values:
    # One video: the class does not repeat the frame rate over frames for several.
    return dict(
        hidden_states=noise(1, 6, 4, 4, 6), timestep=torch.tensor([[100, 100, 300, 700]]),
        encoder_hidden_states=noise(1, 5, 24, seed=2), enable_diffusion_forcing=True, fps=[1],
    )  # fmt: skip


FAMILIES = [
    Family("SkyReelsV2Transformer3DModel", image_to_video, image_inputs, "image to video"),
    Family("SkyReelsV2Transformer3DModel", forcing, forcing_inputs, "diffusion forcing"),
]
