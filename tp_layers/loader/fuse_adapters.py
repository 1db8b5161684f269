"""Adapters added to the weights of a sharded model, once its shards are read: `weight + factor * up @ down`.

In float32 and rounded once, whatever the number of adapters; each rank computes its rows or columns alone, a few MiB
at a time.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..group import Group
from ..layers.low_rank import LowRank
from ..layers.options import is_wide_float
from ..plans.spec import ShardSpec
from .adapter_check import check_fusable, cut_layers
from .adapter_file import read_adapter
from .folder import naming

# Of a weight, in float32 beside it.
PIECE_BYTES = 8 << 20


class ToFuse(NamedTuple):
    """For each layer what is added to this rank's shard of it; and what all ranks must have alike."""

    layers: dict[str, list[LowRank]]
    facts: list[str]


def adapters_to_fuse(adapters: Any, model: nn.Module, specs: Mapping[str, ShardSpec], group: Group) -> ToFuse:
    """The `adapters`, pairs of a path and a scale, cut for a `model` that is about to be sharded.

    Raises:
        ValueError: they are no such pairs, or one is not for this model (see `read_adapter`, `cut_layers`).
        FileNotFoundError: one is not there.
    """
    found = ToFuse({}, [])
    for path, scale in _pairs(adapters):
        adapter = read_adapter(model, path)
        with naming(adapter.file):
            parts = cut_layers(model, adapter.layers, specs, group)
            check_fusable(model, adapter.layers)
            for name, part in parts.items():
                if not is_wide_float(model.get_parameter(f"{name}.weight").dtype):
                    raise ValueError(
                        f"'{name}' is loaded in {model.get_parameter(f'{name}.weight').dtype}: pass dtype="
                    )
                part.scale = scale
                found.layers.setdefault(name, []).append(part)
        found.facts.append(f"{adapter.digest} times {scale}")
    return found


def check_scale(scale: Any) -> float:
    """`scale` as a float.

    Raises:
        ValueError: it is no finite number.
    """
    number = isinstance(scale, int | float) and not isinstance(scale, bool)
    if not number or scale != scale or abs(scale) == float("inf"):
        raise ValueError(f"the scale of an adapter must be a finite number, got {scale!r}")
    return float(scale)


@torch.no_grad()
def fuse_adapters(model: nn.Module, layers: Mapping[str, Sequence[LowRank]]) -> None:
    """Adds them to the weights and biases of a sharded `model`, in place."""
    for path, adapters in layers.items():
        module = model.get_submodule(path)
        weight, bias = module.get_parameter("weight"), module._parameters.get("bias")
        wide = torch.promote_types(weight.dtype, torch.float32)
        moved = [(it.up.to(weight.device, wide), it.down.to(weight.device, wide), it.factor) for it in adapters]
        step = max(1, PIECE_BYTES // (wide.itemsize * max(weight.shape[1], 1)))
        ups = zip(*(up.split(step) for up, _, _ in moved), strict=True)
        for rows, parts in zip(weight.split(step), ups, strict=True):
            total = rows.to(wide, copy=True)
            for up, (_, down, factor) in zip(parts, moved, strict=True):
                total.addmm_(up, down, alpha=factor)
            rows.copy_(total)
        for it in adapters:
            if it.bias is not None and bias is not None:
                bias.copy_(bias.to(wide).add_(it.bias.to(bias.device, wide), alpha=it.factor))


def _pairs(adapters: Any) -> list[tuple[str | Path, float]]:
    if isinstance(adapters, str | Path) or not isinstance(adapters, Sequence):
        raise ValueError(f"adapters must be a list of (path, scale), got {adapters!r}")
    pairs = []
    for item in adapters:
        if not (isinstance(item, tuple | list) and len(item) == 2 and isinstance(item[0], str | Path)):
            raise ValueError(f"adapters must be a list of (path, scale), got {item!r} in it")
        pairs.append((item[0], check_scale(item[1])))
    return pairs
