"""Bria, FIBO and FIBO 2."""

import torch

from .family import Family, Values, noise, positions


def bria(heads: int) -> Values:
    return dict(
        num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=heads, in_channels=8,
        joint_attention_dim=24, axes_dims_rope=[4, 4, 8],
    )  # fmt: skip


def bria_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2),
        timestep=torch.tensor([250.0, 500.0]), img_ids=positions(6, 3), txt_ids=positions(5, 3),
    )  # fmt: skip


def fibo(heads: int) -> Values:
    return dict(text_encoder_dim=20, guidance_embeds=True, **bria(heads))


def fibo_inputs() -> Values:
    # A layer of the text encoder for each block, and a mask over text and image.
    mask = torch.zeros(2, 1, 11, 11)
    mask[1, :, :, 3:5] = -10000.0
    return dict(
        text_encoder_layers=[noise(2, 5, 20, seed=seed) for seed in (3, 4, 5)], guidance=torch.tensor([4.0, 4.0]),
        joint_attention_kwargs={"attention_mask": mask}, **bria_inputs(),
    )  # fmt: skip


def fibo2(heads: int) -> Values:
    return dict(
        in_channels=3, dim=heads * 12, n_layers=3, n_refiner_layers=1, n_heads=heads, cap_feat_dim=20,
        injection_layer_ids=(1,), perceiver_num_layers=1, min_num_gist_tokens=2, max_num_gist_tokens=4, gist_step=2,
        gist_min_text_len=2, gist_max_text_len=5, axes_dims=(4, 4, 4), axes_lens=(16, 8, 8),
    )  # fmt: skip


def fibo2_inputs() -> Values:
    # The shorter text has fewer gist tokens, so those are padded and masked too.
    return dict(
        hidden_states=noise(2, 3, 4, 6), timestep=torch.tensor([0.25, 0.5]),
        encoder_hidden_states=noise(2, 2, 5, 20, seed=2),
        encoder_attention_mask=torch.tensor([[True] * 5, [True] * 2 + [False] * 3]),
        context_latents=[noise(2, 3, 2, 4, seed=3)],
    )  # fmt: skip


FAMILIES = [
    Family("BriaTransformer2DModel", bria, bria_inputs),
    Family("BriaFiboTransformer2DModel", fibo, fibo_inputs),
    Family("BriaFibo2Transformer2DModel", fibo2, fibo2_inputs),
]
