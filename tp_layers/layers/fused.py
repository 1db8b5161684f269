"""What modules of diffusers do, in fewer passes: forwards in place of their own (FLUX.2's blocks: `flux2.py`).

All keep their children, and the children's names. Activations stay where they are, for code that sets another
processor, but are not called.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .epilogue import Activation, Gated

SWIGLU_FIRST = Gated("silu", gate_first=True)
GELU_TANH = Activation("gelu_tanh")


class FusedProjection(nn.Module):
    """The first layer of diffusers' `FeedForward` (GELU, GEGLU, SwiGLU, LinearActivation)."""

    proj: nn.Module
    epilogue: Activation | Gated

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """`[.., K]` -> `[.., N / size]`."""
        return self.proj(hidden_states, self.epilogue)


class FusedSwiGLU(nn.Module):
    """FLUX.2's `Flux2FeedForward`, and FLUX.3's."""

    linear_in: nn.Module
    linear_out: nn.Module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[.., K]` -> `[.., K]`."""
        return self.linear_out(self.linear_in(x, SWIGLU_FIRST))


class Forward:
    """`function(module, ...)` as the forward of one module, whose class stays; of its copy, when it is copied."""

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.function, self.module = function, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.module, *args, **kwargs)


def single_block(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb: torch.Tensor,
    image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """FLUX.1's single block, as diffusers has it; the GELU within `proj_mlp`, and no cat before `proj_out`."""
    text_length = encoder_hidden_states.shape[1]
    residual = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    normed, gate = block.norm(residual, emb=temb)
    mlp = block.proj_mlp(normed, GELU_TANH)
    attention = block.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {}))
    hidden_states = residual + gate.unsqueeze(1) * block.proj_out((attention, mlp))
    if hidden_states.dtype == torch.float16:
        hidden_states = hidden_states.clip(-65504, 65504)
    return hidden_states[:, :text_length], hidden_states[:, text_length:]
