"""Modules that read a split tensor as if it were whole, and need not notice.

Two are known by what they are: a norm over all heads, which a plan leaves to each rank's own, and an activation that
takes one half of its projection for the gates of the other, cut as one block.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .heads import HEADS, beside, counts_of
from .match import Match

# Of queries, keys or values, as in `norm_q`, `k_norm`, `norm_added_k`, `q_rms_norm_t`, `query_norm`; not of what they
# are made of, as `pre_norm_q`.
_OF_HEADS = re.compile(r"^(?!pre_)(.*_)?(q|k|v|query|key|value)(_|$)")
# diffusers' activations that split what their `proj` gives into two.
_GATED = ("GEGLU", "SwiGLU")


def misread(model: nn.Module, matches: Sequence[Match]) -> list[str]:
    """What would take a rank's part for all of it; in words."""
    return [*_across_heads(model, matches), *_halves(model, matches)]


def _across_heads(model: nn.Module, matches: Sequence[Match]) -> Iterator[str]:
    """A norm of queries or keys that the plan leaves out, as wide as all heads of a projection beside it."""
    # Itself, or a parameter of it.
    planned = {place for item in matches for place in (item.path, item.path.rpartition(".")[0])}
    lengths: dict[str, set[int]] = {}
    for item in matches:
        if item.splits:
            lengths.setdefault(item.path.rpartition(".")[0], set()).update(item.style.lengths(item.target))
    for parent, widths in lengths.items():
        module = model.get_submodule(parent)
        heads = [count for name, count in counts_of(model, module)[1].items() if name in HEADS]
        # As wide as one kv head, which ranks share, is within a head.
        wide = widths - {max(widths) // max(heads)} if heads else widths
        for name, child in beside(module):
            path = f"{parent}.{name}".lstrip(".")
            if path not in planned and _OF_HEADS.search(name.rpartition(".")[2]) and _width(child) in wide:
                yield (
                    f"'{path}', a {type(child).__name__} over all {_width(child)} channels, would see only one rank's: "
                    f'call an RMSNorm "rms_norm" and a LayerNorm "layer_norm"; with another, leave the attention whole'
                )


def _width(module: nn.Module) -> int:
    """The channels of a norm over one dim; 0 of anything else."""
    if not type(module).__name__.endswith("Norm"):
        return 0
    weight = getattr(module, "weight", None)
    shape: Any = weight.shape if isinstance(weight, torch.Tensor) else getattr(module, "normalized_shape", None)
    # diffusers' RMSNorm without a weight.
    shape = getattr(module, "dim", None) if shape is None else shape
    return int(shape[0]) if isinstance(shape, Sequence) and len(shape) == 1 else 0


def _halves(model: nn.Module, matches: Sequence[Match]) -> Iterator[str]:
    for item in matches:
        parent, _, name = item.path.rpartition(".")
        if item.splits and name == "proj" and len(item.style.lengths(item.target)) == 1:
            kind = next((it.__name__ for it in type(model.get_submodule(parent)).__mro__ if it.__name__ in _GATED), "")
            if kind:
                yield (
                    f"plan key '{item.key}': '{item.path}' gives both halves of a {kind}, and each rank needs its part "
                    f"of both: use PackedColwiseParallel([1, 1])"
                )
