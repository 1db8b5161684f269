"""What the largest rank computes in a step: the products of its layers, and its part of attention."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from .plans.resolve import Resolved
from .rows import LAYERS, Rows, Tokens

# How a module with experts says how many of them compute a row.
ACTIVE = ("num_activated_experts", "num_experts_per_tok", "top_k", "capacity_factor")


@dataclass(frozen=True)
class Product:
    """Of one weight: floating-point operations, bytes of what the rank holds of it, bytes of rows in and out."""

    path: str
    flops: float
    weight_bytes: int
    row_bytes: int


def products(model: nn.Module, resolved: Resolved, rows: Rows, tokens: Tokens) -> Iterator[Product]:
    """Of every Linear and convolution, and experts in one parameter `[experts, K, N]`: 2 operations a row and weight.

    A convolution's rows are those of its output.
    """
    for path, module in model.named_modules():
        for name in _weights(path, module):
            full = module.get_parameter(name)
            local, count = local_shape(resolved, f"{path}.{name}", full), tokens.of(rows.kind(path))
            if count:
                wide = sum(local[:2]) if name == "weight" else sum(local[1:])
                held, itemsize = math.prod(local), full.dtype.itemsize
                share = _share(model, path, full)
                yield Product(path, 2 * count * held * share, held * itemsize, count * wide * itemsize)


def attentions(model: nn.Module, resolved: Resolved, rows: Rows, tokens: Tokens) -> Iterator[float]:
    """Operations of the scores and of their product with the values, by this rank's part of the queries' width."""
    for path, module in model.named_modules():
        named = {name: child for name, child in module.named_children() if isinstance(child, nn.Linear)}
        queries, keys = (
            tokens.together(rows.kind(f"{path}.{name}") for name in named if letter in name) for letter in ("q", "k")
        )
        if queries and keys:
            name = next(name for name in named if "q" in name)
            full = named[name].weight
            part = local_shape(resolved, f"{path}.{name}.weight", full)[0] / full.shape[0]
            yield 4 * queries * keys * _width(module, named) * part


def local_shape(resolved: Resolved, name: str, full: torch.Tensor) -> tuple[int, ...]:
    """The shape of the parameter `name` on rank 0, which has the most."""
    spec = resolved.specs.get(name)
    return tuple(full.shape) if spec is None else spec.local_shape(full.shape, 0, resolved.size)


def _weights(path: str, module: nn.Module) -> list[str]:
    if isinstance(module, LAYERS):
        return ["weight"]
    if path.rpartition(".")[2] != "experts":
        return []
    return [name for name, parameter in module.named_parameters(recurse=False) if parameter.dim() == 3]


def _share(model: nn.Module, path: str, weight: torch.Tensor) -> float:
    """The part of its rows that a weight sees: less than one among experts of which a row takes some."""
    holder, among, _ = f"{path}.".rpartition(".experts.")
    if not among:
        return 1.0
    # Experts in one parameter are counted as often as there are of them.
    number = len(weight) if weight.dim() == 3 else len(list(model.get_submodule(f"{holder}.experts").children()))
    found = (getattr(model.get_submodule(holder), name, None) for name in ACTIVE)
    active = next((value for value in found if isinstance(value, int | float)), number)
    return min(active / number, 1.0)


def _width(module: nn.Module, named: dict[str, nn.Linear]) -> int:
    """The channels of all queries of an attention module."""
    inner = getattr(module, "inner_dim", None)
    if isinstance(inner, int):
        return inner
    alone = [child.out_features for name, child in named.items() if "q" in name and "k" not in name]
    if alone:
        return alone[0]
    heads = (getattr(module, name, None) for name in ("heads", "num_heads"))
    count, head_dim = next((it for it in heads if isinstance(it, int)), 0), getattr(module, "head_dim", 0)
    return count * head_dim
