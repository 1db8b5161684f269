"""Z-Image and Z-Image Omni."""

import torch

from .family import Family, Values, noise


def z_image(heads: int) -> Values:
    return dict(
        in_channels=4, dim=heads * 12, n_layers=2, n_refiner_layers=1, n_heads=heads, n_kv_heads=heads, cap_feat_dim=24,
        axes_dims=[4, 4, 4], axes_lens=[128, 16, 16],
    )  # fmt: skip


def z_image_inputs() -> Values:
    # Two images of different sizes: a batch with padding.
    return dict(
        x=[noise(4, 1, 4, 6), noise(4, 1, 8, 20, seed=2)], t=torch.tensor([0.25, 0.5]),
        cap_feats=[noise(5, 24, seed=3), noise(7, 24, seed=4)],
    )  # fmt: skip


def omni(heads: int) -> Values:
    return dict(z_image(heads), siglip_feat_dim=18)


def omni_inputs() -> Values:
    # A clean image to look at, and its SigLIP features, before the noisy one.
    return dict(
        x=[[noise(4, 1, 4, 4), noise(4, 1, 4, 6, seed=2)]], t=torch.tensor([0.25]),
        cap_feats=[[noise(5, 24, seed=3), noise(7, 24, seed=4)]], siglip_feats=[[noise(2, 3, 18, seed=5), None]],
        image_noise_mask=[[0, 1]],
    )  # fmt: skip


FAMILIES = [
    Family("ZImageTransformer2DModel", z_image, z_image_inputs, variant="text"),
    Family("ZImageTransformer2DModel", omni, omni_inputs, variant="with SigLIP features"),
]
