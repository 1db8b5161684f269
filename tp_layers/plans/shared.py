"""Pieces of plans that several families share. Each takes the path of a module and returns that module's entries."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from .styles import PackedColwiseParallel, PackedRowwiseParallel

Plan = dict[str, Any]
# Of a family's file: name of a published model -> its class, and the config's entries that differ from the defaults.
Published = dict[str, tuple[str, dict[str, Any]]]

# What `fuse_qkv_projections()` may add to an attention, beside the separate projections: those stay, read by nobody.
FUSED = ("to_qkv", "to_kv", "to_added_qkv", "to_added_kv")


def projections(path: str, qkv: Sequence[int] = (1, 1, 1)) -> Plan:
    """`to_q`, `to_k`, `to_v` by heads, and what fusing them (and a second stream's) gives.

    `qkv`: the widths of queries, keys and values, or their proportions, where there are fewer heads of keys and values.
    """
    fused = {name: PackedColwiseParallel(qkv if name.endswith("qkv") else qkv[1:]) for name in FUSED}
    return {
        f"{path}.to_q": "colwise",
        f"{path}.to_k": "colwise",
        f"{path}.to_v": "colwise",
        **{f"{path}.{name}?": style for name, style in fused.items()},
    }


def self_attention(path: str, qkv: Sequence[int] = (1, 1, 1)) -> Plan:
    """`projections`, and the output projection `to_out.0`."""
    return {**projections(path, qkv), f"{path}.to_out.0": "rowwise"}


def joint_attention(path: str) -> Plan:
    """Self-attention plus the projections of a second (text) stream."""
    return {
        **self_attention(path),
        f"{path}.add_q_proj": "colwise",
        f"{path}.add_k_proj": "colwise",
        f"{path}.add_v_proj": "colwise",
        f"{path}.to_add_out": "rowwise",
    }


def feed_forward(path: str, first: Any = "colwise") -> Plan:
    """diffusers' `FeedForward`; a gated one has its two halves in one Linear, so `first` is packed there."""
    return {f"{path}.net.0.proj": first, f"{path}.net.2": "rowwise"}


def feed_forward_of(model: nn.Module, path: str) -> Plan:
    """`feed_forward`, whose first layer has two halves if the activation in the model's config is a gated one."""
    config: Any = model.config
    gated = config.activation_fn in ("geglu", "swiglu")
    return feed_forward(path, PackedColwiseParallel([1, 1]) if gated else "colwise")


def double_block(path: str, first: Any = "colwise") -> Plan:
    """A block of FLUX.1's kind with two streams: a modulation and an MLP each, one attention."""
    return {
        f"{path}.norm1.linear": "modulation",
        f"{path}.norm1_context.linear": "modulation",
        **joint_attention(f"{path}.attn"),
        **feed_forward(f"{path}.ff", first),
        **feed_forward(f"{path}.ff_context", first),
    }


def single_block(path: str, first: Any = "colwise") -> Plan:
    """A block of FLUX.1's kind with one stream: attention and MLP side by side, with one output projection."""
    return {
        f"{path}.norm.linear": "modulation",
        **projections(f"{path}.attn"),
        f"{path}.proj_mlp": first,
        # Its input is the attention's output and the MLP's, one after the other.
        f"{path}.proj_out": PackedRowwiseParallel(
            lambda linear: [linear.out_features, linear.in_features - linear.out_features]
        ),
    }
