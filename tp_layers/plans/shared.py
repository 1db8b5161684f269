"""Pieces of plans that several families share. Each takes the path of a module and returns that module's entries."""

from typing import Any

from torch import nn

from .styles import PackedColwiseParallel

Plan = dict[str, Any]
# Of a family's file: name of a published model -> its class, and the config's entries that differ from the defaults.
Published = dict[str, tuple[str, dict[str, Any]]]


def self_attention(path: str) -> Plan:
    """`to_q`, `to_k`, `to_v` by heads, and the output projection `to_out.0`."""
    return {
        f"{path}.to_q": "colwise",
        f"{path}.to_k": "colwise",
        f"{path}.to_v": "colwise",
        f"{path}.to_out.0": "rowwise",
    }


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
