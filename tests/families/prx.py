"""PRX."""

import torch

from .family import Family, Values, noise


def prx(heads: int) -> Values:
    return dict(
        in_channels=3, patch_size=2, context_in_dim=24, hidden_size=heads * 16, mlp_ratio=3.5, num_heads=heads, depth=2,
        axes_dim=[8, 8], bottleneck_size=10, resolution_embeds=True,
    )  # fmt: skip


def prx_inputs() -> Values:
    return dict(
        hidden_states=noise(2, 3, 4, 6), encoder_hidden_states=noise(2, 5, 24, seed=2),
        timestep=torch.tensor([0.25, 0.5]), attention_mask=torch.tensor([[True] * 5, [True] * 3 + [False] * 2]),
    )  # fmt: skip


FAMILIES = [Family("PRXTransformer2DModel", prx, prx_inputs)]
