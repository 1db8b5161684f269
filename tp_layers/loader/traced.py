"""Tensors that remember which named tensors they were made of, to see what a converter of checkpoints drops.

Converters rename, split, scale and leave out; some do the last without an error. Run on traced tensors, every tensor
that comes out names its sources, and a number that was read (`.item()`) is noted.
"""

from collections.abc import Mapping
from typing import Any

import torch

# What takes the number out of a tensor.
READS = ("item", "__float__", "__int__", "tolist")


class Traced(torch.Tensor):
    """A tensor with the names of its `sources`, which its descendants inherit."""

    sources: frozenset[str]
    read: set[str]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        parents = [it for it in _flat([args, kwargs]) if isinstance(it, Traced) and hasattr(it, "sources")]
        if not parents:
            return result
        names, read = frozenset().union(*(parent.sources for parent in parents)), parents[0].read
        if getattr(func, "__name__", "") in READS:
            read.update(names)
        return _marked(result, names, read)


def trace(tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], set[str]]:
    """The tensors, each with its own name for its source; and the set of names that will be read as numbers."""
    read: set[str] = set()
    return {name: _marked(tensor, frozenset([name]), read) for name, tensor in tensors.items()}, read


def untraced(tensor: torch.Tensor) -> tuple[torch.Tensor, frozenset[str]]:
    """The plain tensor, and its sources: none, if it was made of no traced one."""
    sources: frozenset[str] = getattr(tensor, "sources", frozenset())
    return tensor.as_subclass(torch.Tensor), sources


def _marked(value: Any, names: frozenset[str], read: set[str]) -> Any:
    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            marked = value if isinstance(value, Traced) else value.as_subclass(Traced)
        marked.sources, marked.read = names, read
        return marked
    return type(value)(_marked(item, names, read) for item in value) if type(value) in (tuple, list) else value


def _flat(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [found for item in value for found in _flat(item)]
    return [found for item in value.values() for found in _flat(item)] if isinstance(value, dict) else [value]
