"""A plan, checked against a model: every way it can be wrong is raised here, before a byte moves.

Only shapes and attributes are read, so a model on the meta device is enough.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .match import Match, match
from .spec import ShardSpec
from .styles import STYLES, ShardParameter, Style

# The integers in which attention modules and configs count their heads.
HEADS = ("heads", "num_heads", "n_heads", "num_attention_heads")
KV_HEADS = ("kv_heads", "num_kv_heads", "n_kv_heads", "num_key_value_heads")
LARGEST_SIZE = 64


@dataclass(frozen=True)
class Resolved:
    """What a plan does to one model at one size.

    `styles`: module (or bare parameter) path -> style; `specs`: parameter name -> spec, sharded parameters only;
    `sizes`: the sizes up to 64 that the plan allows; `notes`: what the reader should know.
    """

    size: int
    styles: dict[str, Style]
    specs: dict[str, ShardSpec]
    sizes: list[int]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Count:
    """An integer that the size must divide."""

    what: str
    value: int


def resolve(model: nn.Module, plan: Mapping[str, Any], size: int, *, check: bool = True) -> Resolved:
    """Checks `plan` against `model` for `size` ranks.

    With `check=False`, a colwise output that nobody takes split is noted instead of refused.

    Raises:
        ValueError: whatever is wrong, with the key or parameter, the numbers, and what would work.
    """
    if size < 1:
        raise ValueError(f"the size must be at least 1, got {size}")
    matches = match(model, plan)
    specs: dict[str, ShardSpec] = {}
    counts: list[_Count] = []
    for item in matches:
        try:
            for name, spec in _specs(item).items():
                specs[name] = spec
                counts += _block_counts(name, spec)
            if isinstance(item.target, nn.Module):
                counts += [_Count(f"'{item.path}': {k}", v) for k, v in item.style.counts(item.target).items()]
        except ValueError as error:
            raise ValueError(f"plan key '{item.key}' at '{item.path}': {error}") from None
    _check_parameters(matches)
    counts += _head_counts(model, matches)
    sizes = _check_size(counts, size)
    notes = _unread(matches)
    if notes and check:
        raise ValueError(f"{notes[0]}; pass check=False if that is meant")
    styles = {item.path: item.style for item in matches}
    for path in _head_norms(model, matches):
        styles[path] = STYLES["replicated_with_grad_allreduce"]
    return Resolved(size, styles, specs, sizes, notes)


def _specs(item: Match) -> dict[str, ShardSpec]:
    if isinstance(item.style, ShardParameter):
        if isinstance(item.target, nn.Module):
            raise ValueError(f"ShardParameter names a parameter, this is the module {type(item.target).__name__}")
        return {item.path: item.style.parameter_spec(item.target)}
    if not isinstance(item.target, nn.Module):
        raise ValueError("it is a bare parameter: only ShardParameter(dim) shards one")
    return {f"{item.path}.{name}": spec for name, spec in item.style.specs(item.target).items()}


def _check_parameters(matches: list[Match]) -> None:
    """Raises if a bare parameter of the plan belongs to a layer that the plan shards as a whole."""
    layers = {
        item.path: item for item in matches if isinstance(item.target, nn.Module) and item.style.specs(item.target)
    }
    for item in matches:
        layer = layers.get(item.path.rpartition(".")[0])
        if isinstance(item.style, ShardParameter) and layer is not None:
            raise ValueError(f"the plan keys '{layer.key}' and '{item.key}' both shard '{item.path}': drop one of them")


def _block_counts(name: str, spec: ShardSpec) -> list[_Count]:
    several = f" in blocks {list(spec.blocks)}" if len(spec.blocks) > 1 else ""
    return [_Count(f"'{name}' (dim {spec.dim}{several}): a block", block) for block in spec.blocks]


def _head_counts(model: nn.Module, matches: list[Match]) -> list[_Count]:
    """The head counts of every module whose own projections are split, else those of the model's config."""
    counts: dict[str, _Count] = {}
    for item in matches:
        if not _splits(item):
            continue
        path = item.path.rpartition(".")[0]
        parent = model.get_submodule(path)
        own = _heads(parent)
        if own:
            counts |= {f"{path}.{name}": _Count(f"'{path}': {name}", value) for name, value in own.items()}
        elif "Attention" in type(parent).__name__:
            # A model of several stacks has a config for each, which its attention modules hold.
            config = getattr(parent, "config", getattr(model, "config", None))
            for name, value in _heads(config).items():
                counts[f"{name} {value}"] = _Count(f"the model's {name}", value)
    return list(counts.values())


def _heads(owner: Any) -> dict[str, int]:
    values = {name: getattr(owner, name, None) for name in HEADS + KV_HEADS}
    found = {name: value for name, value in values.items() if isinstance(value, int) and not isinstance(value, bool)}
    # diffusers' Attention keeps the width of its kv heads, not their number.
    inner, inner_kv = getattr(owner, "inner_dim", None), getattr(owner, "inner_kv_dim", None)
    if "heads" in found and inner and inner_kv:
        found.setdefault("kv_heads", found["heads"] * inner_kv // inner)
    return found


def _check_size(counts: list[_Count], size: int) -> list[int]:
    common = math.gcd(*(count.value for count in counts)) if counts else 0
    sizes = [candidate for candidate in range(1, LARGEST_SIZE + 1) if common % candidate == 0]
    wrong = next((count for count in counts if count.value % size), None)
    if wrong is not None:
        raise ValueError(
            f"{wrong.what} of {wrong.value} is not divisible by {size} ranks; sizes that work for this plan: "
            f"{', '.join(map(str, sizes))}"
        )
    return sizes


def _unread(matches: list[Match]) -> list[str]:
    """Split outputs that no planned module of their block takes."""
    readers = [item.path for item in matches if item.style.input == "split" and item.style.output == "whole"]
    notes = []
    for item in matches:
        if item.style.output != "split" or item.style.input == "split":
            continue
        block = item.block
        if not any(path == block or path.startswith(f"{block}.") or not block for path in readers):
            where = f"no module in '{block}'" if block else "no module in the model"
            notes.append(
                f"plan key '{item.key}': the output of '{item.path}' is split, and {where} takes a split input"
            )
    return notes


def _head_norms(model: nn.Module, matches: list[Match]) -> list[str]:
    """Norms beside a split projection whose weight covers one head of it: each rank's gradient is of its own heads.

    A norm as wide as what enters or leaves the module that holds it stands before or after the projections, and its
    gradient is whole.
    """
    planned = {item.path for item in matches}
    linears = [(item, item.target.weight.shape) for item in matches if isinstance(item.target, nn.Linear)]
    projections = [(item.path.rpartition(".")[0], shape) for item, shape in linears if _splits(item)]
    found: list[str] = []
    for path in dict.fromkeys(parent for parent, _ in projections):
        module, prefix = model.get_submodule(path), f"{path}." if path else ""
        rows, columns = zip(*(shape for parent, shape in projections if parent == path), strict=True)
        readers = [shape for item, shape in linears if item.style.input == "split" and item.path.startswith(prefix)]
        outer = {*columns, *(shape[0] for shape in readers)}
        heads = {max(rows) / count for name, count in _heads(module).items() if name in HEADS}
        for name, child in module.named_children():
            width = _norm_width(child)
            inner = width in heads or width not in outer
            if width and inner and f"{prefix}{name}" not in planned:
                found += [f"{prefix}{name}"] if any(width < row and row % width == 0 for row in rows) else []
    return found


def _splits(item: Match) -> bool:
    return item.style.input == "whole" and item.style.output == "split"


def _norm_width(module: nn.Module) -> int:
    weight = getattr(module, "weight", None) if type(module).__name__.endswith("Norm") else None
    return len(weight) if isinstance(weight, torch.Tensor) and weight.dim() == 1 else 0
