"""Tiny models of the registered families, every parameter drawn, and inputs for them.

Head counts and blocks divide by 1, 2 and 4; `heads=3` gives a model that divides by 3. Widths are chosen so that no two
dims of a weight are equal by accident. Timesteps and guidance stay exact in bfloat16 when a model multiplies them by
1000: a rounded timestep would be another input.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
from torch import nn

from close import randomise

Inputs = dict[str, Any]


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    """Standard normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def positions(count: int, axes: int) -> torch.Tensor:
    """Position ids `[count, axes]` that differ along the last two axes."""
    ids = torch.zeros(count, axes)
    ids[:, -1], ids[:, -2] = torch.arange(count) % 3, torch.arange(count) // 3
    return ids


def flux(heads: int) -> Inputs:
    return dict(
        num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=heads, in_channels=8,
        joint_attention_dim=24, pooled_projection_dim=20, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip


def flux_inputs() -> Inputs:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), pooled_projections=noise(2, 20),
        timestep=torch.tensor([0.25, 0.5]), guidance=torch.tensor([4.0, 4.0]), img_ids=positions(6, 3),
        txt_ids=positions(5, 3),
    )  # fmt: skip


def flux2(heads: int) -> Inputs:
    return dict(
        in_channels=8, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=24, timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip


def flux2_inputs() -> Inputs:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), timestep=torch.tensor([0.25, 0.5]),
        guidance=torch.tensor([4.0, 4.0]), img_ids=positions(6, 4), txt_ids=positions(5, 4),
    )  # fmt: skip


def qwenimage(heads: int) -> Inputs:
    return dict(
        in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=heads,
        joint_attention_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def qwenimage_inputs() -> Inputs:
    return dict(
        hidden_states=noise(2, 6, 16), encoder_hidden_states=noise(2, 5, 24, seed=2),
        encoder_hidden_states_mask=torch.ones(2, 5, dtype=torch.long), timestep=torch.tensor([0.25, 0.5]),
        img_shapes=[[(1, 2, 3)]] * 2,
    )  # fmt: skip


def qwenimage21(heads: int) -> Inputs:
    return dict(
        in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=heads,
        context_in_dim=24, axes_dims_rope=(4, 6, 6),
    )  # fmt: skip


def qwenimage21_inputs() -> Inputs:
    # Three text tokens, then one slot that stands for the 2 x 2 latent tokens of the image.
    return dict(
        hidden_states=noise(2, 4, 8), encoder_hidden_states=noise(2, 3, 24, seed=2), timestep=torch.tensor([0.5]),
        img_shapes=[[(1, 2, 2)]] * 2, img_mask=torch.tensor([[False, False, False, True]] * 2),
    )  # fmt: skip


def minimax_h3(heads: int) -> Inputs:
    return dict(
        num_attention_heads=heads, attention_head_dim=16, hidden_size=40, num_layers=2, num_refiner_layers=1,
        ffn_dim=heads * 12, in_channels=3, audio_in_channels=5, text_dim=24, freq_dim=16, time_embed_hidden_dim=28,
        time_embed_dim=12 * heads, rope_freq_dim=2,
    )  # fmt: skip


def minimax_h3_inputs() -> Inputs:
    # Eleven rows: four of text, four of video (one of them at another noise level), three of audio.
    tags = torch.tensor([1] * 4 + [0] * 4 + [2] * 3)
    return dict(
        hidden_states=noise(1, 4, 12), audio_hidden_states=noise(1, 3, 5, seed=2),
        encoder_hidden_states=noise(1, 4, 24, seed=3), timestep=torch.tensor([0.25, 0.75]),
        timestep_indices=torch.tensor([0] * 7 + [1] * 4), token_tags=tags, position_ids=positions(11, 3),
        video_indices=(tags == 0).nonzero()[:, 0], audio_indices=(tags == 2).nonzero()[:, 0],
        text_indices=(tags == 1).nonzero()[:, 0],
    )  # fmt: skip


def ltx(heads: int) -> Inputs:
    return dict(
        in_channels=8, out_channels=8, num_attention_heads=heads, attention_head_dim=16, cross_attention_dim=heads * 16,
        num_layers=2, caption_channels=24,
    )  # fmt: skip


def ltx_inputs() -> Inputs:
    return dict(
        hidden_states=noise(2, 6, 8), encoder_hidden_states=noise(2, 5, 24, seed=2), timestep=torch.tensor([300, 700]),
        encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]), num_frames=1, height=2, width=3,
    )  # fmt: skip


@dataclass(frozen=True)
class Family:
    """How to build one tiny model, and what its forward takes."""

    name: str
    config: Callable[[int], Inputs]
    inputs: Callable[[], Inputs]

    # Parameters that nothing reads in the unsharded model either (the text stream ends in the last block).
    dead: str = "(?!)"

    def build(self, heads: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model, every parameter drawn, in eval mode, with the dtypes diffusers' from_pretrained would give it."""
        model = randomise(getattr(diffusers, self.name)(**self.config(heads)))
        keep = set(model._keep_in_fp32_modules or [])
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data if keep & set(name.split(".")) else parameter.data.to(dtype)
        return model.eval()


FAMILIES = {
    family.name: family
    for family in (
        Family("FluxTransformer2DModel", flux, flux_inputs),
        Family("Flux2Transformer2DModel", flux2, flux2_inputs),
        Family(
            "QwenImageTransformer2DModel",
            qwenimage,
            qwenimage_inputs,
            dead=r"blocks\.1\.(attn\.(add_q|to_add)|txt_mlp)",
        ),
        Family("QwenImage21Transformer2DModel", qwenimage21, qwenimage21_inputs),
        Family("MiniMaxH3Transformer3DModel", minimax_h3, minimax_h3_inputs),
        Family("LTXVideoTransformer3DModel", ltx, ltx_inputs),
    )
}


def run(model: nn.Module, inputs: Inputs, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The output tensors of one forward call; floating-point inputs in `dtype`."""
    cast = {
        name: value.to(dtype) if dtype and isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }
    with torch.no_grad():
        output = model(**cast, return_dict=False)
    return [tensor for tensor in output if isinstance(tensor, torch.Tensor)]
