"""Attention heads in a plan: the counts that the size must divide, and the norms that act within a head."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .match import Match

# The integers in which attention modules and configs count their heads.
HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads")
KV_HEADS = ("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads")


@dataclass(frozen=True)
class Count:
    """An integer that the size must divide."""

    what: str
    value: int


def head_counts(model: nn.Module, matches: list[Match]) -> list[Count]:
    """The head counts of every module whose own projections are split, else those of the model's config."""
    counts: dict[str, Count] = {}
    for item in matches:
        if not item.splits:
            continue
        path = item.path.rpartition(".")[0]
        own, found = counts_of(model, model.get_submodule(path))
        for name, value in found.items():
            key, what = (f"{path}.{name}", f"'{path}': {name}") if own else (f"{name} {value}", f"the model's {name}")
            counts[key] = Count(what, value)
    return list(counts.values())


def counts_of(model: nn.Module, module: nn.Module) -> tuple[bool, dict[str, int]]:
    """The head counts of `module` by name, and whether they are its own; else those of the config of an attention."""
    own = _heads(module)
    if own or "Attention" not in type(module).__name__:
        return True, own
    # A model of several stacks has a config for each, which its attention modules hold.
    return False, _heads(getattr(module, "config", getattr(model, "config", None)))


def _heads(owner: Any) -> dict[str, int]:
    values = {name: getattr(owner, name, None) for name in HEADS + KV_HEADS}
    found = {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    # diffusers' Attention keeps the width of its kv heads, not their number.
    inner, inner_kv = getattr(owner, "inner_dim", None), getattr(owner, "inner_kv_dim", None)
    if "heads" in found and inner and inner_kv:
        found.setdefault("kv_heads", found["heads"] * inner_kv // inner)
    return found


def head_norms(model: nn.Module, matches: list[Match]) -> list[str]:
    """Norms beside a split projection whose weight covers one head of it: each rank's gradient is of its own heads.

    A norm as wide as what enters or leaves the module that holds it stands before or after the projections, and its
    gradient is whole.
    """
    planned = {item.path for item in matches}
    linears = [(item, item.target.weight.shape) for item in matches if isinstance(item.target, nn.Linear)]
    projections = [(item.path.rpartition(".")[0], shape) for item, shape in linears if item.splits]
    found: list[str] = []
    for path in dict.fromkeys(parent for parent, _ in projections):
        module, prefix = model.get_submodule(path), f"{path}." if path else ""
        rows, columns = zip(*(shape for parent, shape in projections if parent == path), strict=True)
        readers = [shape for item, shape in linears if item.style.input == "split" and item.path.startswith(prefix)]
        outer = {*columns, *(shape[0] for shape in readers)}
        heads = {max(rows) / count for name, count in _heads(module).items() if name in HEADS}
        for name, child in beside(module):
            width = _norm_width(child)
            inner = width in heads or width not in outer
            if width and inner and f"{prefix}{name}" not in planned:
                found += [f"{prefix}{name}"] if any(width < row and row % width == 0 for row in rows) else []
    return found


def beside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The children of a module that holds projections, and what lies in those that hold none, as `norm.query_norm`."""
    for name, child in module.named_children():
        yield name, child
        if not any(isinstance(inner, nn.Linear) for inner in child.modules()):
            yield from ((f"{name}.{path}", inner) for path, inner in child.named_modules() if path)


def _norm_width(module: nn.Module) -> int:
    weight = getattr(module, "weight", None) if type(module).__name__.endswith("Norm") else None
    return len(weight) if isinstance(weight, torch.Tensor) and weight.dim() == 1 else 0
