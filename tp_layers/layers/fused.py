"""What modules of diffusers do, in fewer passes: forwards and an attention processor in place of their own.

All keep their children, and the children's names. Activations stay where they are, for code that sets another
processor, but are not called.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .epilogue import Activation, Gated, Parallel

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


class ParallelSelfAttention:
    """In place of FLUX.2's `Flux2ParallelSelfAttnProcessor`: no pass over the MLP by itself, and no cat."""

    # Where diffusers writes what `set_attention_backend` and context parallelism ask for.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> torch.Tensor:
        """`[batch, tokens, K]` -> the same shape."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn
        from diffusers.models.embeddings import apply_rotary_emb

        *qkv, mlp = attn.to_qkv_mlp_proj(hidden_states, Parallel("silu"))
        query, key, value = (part.unflatten(-1, (-1, attn.head_dim)) for part in qkv)
        query, key = attn.norm_q(query), attn.norm_k(key)
        if image_rotary_emb is not None:
            query = apply_rotary_emb(query, image_rotary_emb, sequence_dim=1)
            key = apply_rotary_emb(key, image_rotary_emb, sequence_dim=1)
        attention = dispatch_attention_fn(
            query,
            key,
            value,
            attn_mask=attention_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        return attn.to_out((attention.flatten(2, 3).to(query.dtype), mlp))
