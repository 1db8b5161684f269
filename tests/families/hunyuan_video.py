"""HunyuanVideo, its Framepack and 1.5, and HunyuanImage."""

from typing import Any

import torch

from .family import Family, Values, noise

MASK = torch.tensor([[1] * 5, [1] * 3 + [0] * 2])


def video(heads: int, **different: Any) -> Values:
    return dict(
        in_channels=4, out_channels=4, num_attention_heads=heads, attention_head_dim=16, num_layers=1,
        num_single_layers=2, num_refiner_layers=1, mlp_ratio=3.0, text_embed_dim=24, pooled_projection_dim=20,
        rope_axes_dim=(4, 6, 6), **different,
    )  # fmt: skip


def video_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 4, 2, 4, 6), timestep=torch.tensor([300, 700]),
        encoder_hidden_states=noise(2, 5, 24, seed=2), encoder_attention_mask=MASK, pooled_projections=noise(2, 20),
        guidance=torch.tensor([4.0, 6.0]),
    )  # fmt: skip


def token_replace(heads: int) -> Values:
    return video(heads, image_condition_type="token_replace")


def framepack(heads: int) -> Values:
    return video(heads, has_image_proj=True, image_proj_dim=18, has_clean_x_embedder=True)


def framepack_inputs() -> Values:
    # Clean frames, and older ones that are halved and quartered along every axis.
    return dict(
        video_inputs(), image_embeds=noise(2, 3, 18, seed=3), indices_latents=torch.tensor([7, 8]),
        latents_clean=noise(2, 4, 2, 4, 6, seed=4), indices_latents_clean=torch.tensor([0, 6]),
        latents_history_2x=noise(2, 4, 2, 4, 6, seed=5), indices_latents_history_2x=torch.tensor([4, 5]),
        latents_history_4x=noise(2, 4, 4, 4, 6, seed=6), indices_latents_history_4x=torch.tensor([0, 1, 2, 3]),
    )  # fmt: skip


def video15(heads: int) -> Values:
    return dict(
        in_channels=4, out_channels=4, num_attention_heads=heads, attention_head_dim=16, num_layers=2,
        num_refiner_layers=1, mlp_ratio=3.0, text_embed_dim=24, text_embed_2_dim=22, image_embed_dim=18,
        rope_axes_dim=(4, 6, 6),
    )  # fmt: skip


def second_text() -> Values:
    return dict(
        timestep=torch.tensor([300.0, 700.0]), encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_attention_mask=MASK, encoder_hidden_states_2=noise(2, 4, 22, seed=3),
        encoder_attention_mask_2=torch.tensor([[1] * 3 + [0], [1] * 4]),
    )  # fmt: skip


def video15_inputs() -> Values:
    return dict(second_text(), hidden_states=noise(2, 4, 2, 2, 3), image_embeds=noise(2, 3, 18, seed=4))


def image(heads: int) -> Values:
    return dict(
        in_channels=4, out_channels=4, num_attention_heads=heads, attention_head_dim=16, num_layers=1,
        num_single_layers=2, num_refiner_layers=1, mlp_ratio=3.0, guidance_embeds=True, text_embed_dim=24,
        text_embed_2_dim=22, rope_axes_dim=(6, 10),
    )  # fmt: skip


def image_inputs() -> Values:
    return dict(second_text(), hidden_states=noise(2, 4, 2, 3), guidance=torch.tensor([4.0, 6.0]))


VIDEO = "HunyuanVideoTransformer3DModel"
# The refiner has neither norms nor positions on its keys.
KEYS = r"refiner_blocks\.0\.attn\.to_k\.bias"
FAMILIES = [
    Family(VIDEO, video, video_inputs, variant="text", cancelled=KEYS),
    Family(VIDEO, token_replace, video_inputs, variant="with a frame replaced", cancelled=KEYS),
    Family("HunyuanVideoFramepackTransformer3DModel", framepack, framepack_inputs, cancelled=KEYS),
    Family(
        "HunyuanVideo15Transformer3DModel",
        video15,
        video15_inputs,
        dead=r"^transformer_blocks\.1\.(attn\.(add_q|to_add)|ff_context)",
        cancelled=KEYS,
    ),
    Family("HunyuanImageTransformer2DModel", image, image_inputs, cancelled=KEYS),
]
