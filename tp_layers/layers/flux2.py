"""FLUX.2's blocks as diffusers has them, in fewer passes, and with one all-reduce for both streams of a double block.

    hidden_states          [batch, image tokens, K]; in a single block text and image tokens, in this order
    encoder_hidden_states  [batch, text tokens, K]
    temb_mod.., temb_mod   [batch, 6 K] or [batch, 1, 6 K] in a double block, of 3 K in a single one
    image_rotary_emb       cosines and sines, [tokens, channels of a head]

What is computed is the same, in the same order, but for roundings: a product and a sum are one pass.
"""

from typing import Any

import torch
from torch import nn

from .epilogue import Parallel
from .fused import SWIGLU_FIRST, FusedSwiGLU
from .streams import streams_of

# Cosines and sines.
Rotary = Any


class _Processor:
    """What the two processors share."""

    # Where diffusers writes what `set_attention_backend` and context parallelism ask for.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, emb: Rotary | None
    ) -> torch.Tensor:
        """Attention `[batch, tokens, heads * channels]` of three tensors `[batch, tokens, heads, channels]`."""
        from diffusers.models.attention_dispatch import dispatch_attention_fn
        from diffusers.models.embeddings import apply_rotary_emb

        if emb is not None:
            rotate: Any = apply_rotary_emb
            query, key = (rotate(x, emb, sequence_dim=1) for x in (query, key))
        how = {"attn_mask": mask, "backend": self._attention_backend, "parallel_config": self._parallel_config}
        return dispatch_attention_fn(query, key, value, **how).flatten(2, 3).to(query.dtype)


class JointAttention(_Processor):
    """In place of FLUX.2's `Flux2AttnProcessor`, in double blocks."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> Any:
        """The two streams' outputs, of their shapes; without a second stream, that of the one."""
        from diffusers.models.transformers.transformer_flux2 import _get_qkv_projections

        def heads(x: Any) -> Any:
            return x.unflatten(-1, (-1, attn.head_dim))

        query, key, value, *text = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        query, key, value = attn.norm_q(heads(query)), attn.norm_k(heads(key)), heads(value)
        if attn.added_kv_proj_dim is not None:
            text_query, text_key, text_value = map(heads, text)
            query = torch.cat([attn.norm_added_q(text_query), query], dim=1)
            key = torch.cat([attn.norm_added_k(text_key), key], dim=1)
            value = torch.cat([text_value, value], dim=1)
        attention = self.attend(query, key, value, attention_mask, image_rotary_emb)
        if encoder_hidden_states is None:
            return attn.to_out[1](attn.to_out[0](attention))
        length = encoder_hidden_states.shape[1]
        context, image = attention.split_with_sizes([length, attention.shape[1] - length], dim=1)
        streams = streams_of(attn.to_add_out, image)
        if streams is None:
            context = attn.to_add_out(context)
            return attn.to_out[1](attn.to_out[0](image)), context
        streams.expect(attn.to_out[0], image)
        try:
            context = attn.to_add_out(context)
            return attn.to_out[1](attn.to_out[0](image)), context
        finally:
            streams.clear()


class ParallelSelfAttention(_Processor):
    """In place of FLUX.2's `Flux2ParallelSelfAttnProcessor`: no pass over the MLP by itself, and no cat."""

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        image_rotary_emb: Rotary | None = None,
    ) -> torch.Tensor:
        """`[batch, tokens, K]` -> the same shape."""
        *qkv, mlp = attn.to_qkv_mlp_proj(hidden_states, Parallel("silu"))
        query, key, value = (part.unflatten(-1, (-1, attn.head_dim)) for part in qkv)
        attention = self.attend(attn.norm_q(query), attn.norm_k(key), value, attention_mask, image_rotary_emb)
        return attn.to_out((attention, mlp))


class TextFeedForward(nn.Module):
    """`Flux2FeedForward` of the text stream, whose first half may be computed ahead."""

    linear_in: nn.Module
    act_fn: nn.Module
    linear_out: nn.Module
    _started: tuple[torch.Tensor, int, torch.Tensor] | None = None

    def first_half(self, x: torch.Tensor) -> torch.Tensor:
        """`[.., K]` -> `[.., M / size]`, what `linear_out` takes."""
        return self.act_fn(self.linear_in(x))

    def start(self, x: torch.Tensor) -> torch.Tensor:
        """The first half for `x`, with which this module will be called."""
        hidden = self.first_half(x)
        self._started = x, x._version, hidden
        return hidden

    def forget(self) -> None:
        """Lets go of a first half that was not asked for."""
        self._started = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`[.., K]` -> `[.., K]`."""
        if self._started is None:
            return self.linear_out(self.first_half(x))
        (given, version, hidden), self._started = self._started, None
        return self.linear_out(hidden if given is x and x._version == version else self.first_half(x))


class FusedTextFeedForward(TextFeedForward, FusedSwiGLU):
    """`FusedSwiGLU` likewise."""

    def first_half(self, x: torch.Tensor) -> torch.Tensor:
        """`[.., K]` -> `[.., M / size]`."""
        return self.linear_in(x, SWIGLU_FIRST)


def double_block(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor,
    temb_mod_img: torch.Tensor,
    temb_mod_txt: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The text stream and the image stream after the block, of their shapes."""
    if torch.compiler.is_compiling() or torch.is_grad_enabled() or block.training or _replaced(block):
        theirs, more = type(block).forward, (image_rotary_emb, joint_attention_kwargs)
        return theirs(block, hidden_states, encoder_hidden_states, temb_mod_img, temb_mod_txt, *more)
    (shift, scale, gate), (shift_mlp, scale_mlp, gate_mlp) = _sets(temb_mod_img, 2)
    (c_shift, c_scale, c_gate), (c_shift_mlp, c_scale_mlp, c_gate_mlp) = _sets(temb_mod_txt, 2)
    attention, context_attention = block.attn(
        hidden_states=_modulated(block.norm1(hidden_states), scale, shift),
        encoder_hidden_states=_modulated(block.norm1_context(encoder_hidden_states), c_scale, c_shift),
        image_rotary_emb=image_rotary_emb,
        **(joint_attention_kwargs or {}),
    )
    image = torch.addcmul(hidden_states, gate, attention)
    text = torch.addcmul(encoder_hidden_states, c_gate, context_attention)
    image_normed = _modulated(block.norm2(image), scale_mlp, shift_mlp)
    text_normed = _modulated(block.norm2_context(text), c_scale_mlp, c_shift_mlp)
    mlp, context_mlp = _both(block.ff, image_normed, block.ff_context, text_normed)
    image = torch.addcmul(image, gate_mlp, mlp)
    text = torch.addcmul(text, c_gate_mlp, context_mlp)
    return _clipped(text), image


def single_block(
    block: Any,
    hidden_states: torch.Tensor,
    encoder_hidden_states: torch.Tensor | None,
    temb_mod: torch.Tensor,
    image_rotary_emb: Rotary | None = None,
    joint_attention_kwargs: dict[str, Any] | None = None,
    split_hidden_states: bool = False,
    text_seq_len: int | None = None,
) -> Any:
    """Text and image tokens after the block, as one tensor, or with `split_hidden_states` as two."""
    if encoder_hidden_states is not None:
        text_seq_len = encoder_hidden_states.shape[1]
        hidden_states = torch.cat([encoder_hidden_states, hidden_states], dim=1)
    ((shift, scale, gate),) = _sets(temb_mod, 1)
    normed = _modulated(block.norm(hidden_states), scale, shift)
    attention = block.attn(hidden_states=normed, image_rotary_emb=image_rotary_emb, **(joint_attention_kwargs or {}))
    hidden_states = _clipped(torch.addcmul(hidden_states, gate, attention))
    if split_hidden_states:
        return hidden_states[:, :text_seq_len], hidden_states[:, text_seq_len:]
    return hidden_states


def _both(ff: Any, image: torch.Tensor, ff_context: Any, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What the two MLPs give."""
    streams = streams_of(ff_context.linear_out, text)
    if streams is None:
        return ff(image), ff_context(text)
    try:
        streams.expect(ff_context.linear_out, ff_context.start(text))
        return ff(image), ff_context(text)
    finally:
        streams.clear()
        ff_context.forget()


def _replaced(block: Any) -> bool:
    """Whether an MLP is another one, or its forward is not its class's, as under a step cache."""
    own = "forward" in vars(block.ff) or "forward" in vars(block.ff_context)
    return own or not isinstance(block.ff_context, TextFeedForward)


def _sets(modulation: torch.Tensor, count: int) -> Any:
    from diffusers.models.transformers.transformer_flux2 import Flux2Modulation

    return Flux2Modulation.split(modulation, count)


def _modulated(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(shift, x, 1 + scale)


def _clipped(x: torch.Tensor) -> torch.Tensor:
    """Within float16, as diffusers has it."""
    return x.clip(-65504, 65504) if x.dtype == torch.float16 else x
