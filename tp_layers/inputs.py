"""The first forward of a sharded model: were all ranks given the same inputs?

Ranks with other inputs, as from a generator that was not seeded alike, each add their part of another picture, and
the sum still looks sane. So the first call compares a checksum of all that its arguments hold.
"""

import dataclasses
import hashlib
import inspect
import numbers
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import graphs
from .exchange import gather_objects, largest
from .group import Group

# An odd number whose multiples, modulo 2 ** 64, differ for all positions in a tensor (Knuth's multiplicative hash).
FACTOR = -7046029254386353131
ALIKE = "seed generators alike on every rank, and prepare the inputs alike"


class UnlikeInputsError(ValueError):
    """The ranks were given other inputs; all of them raise it, and can go on together."""


class SameInputs:
    """The hook before each forward of a model until one has had the same inputs everywhere, after which it is gone."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # A traced or captured graph would make the comparison in every call.
        if torch.compiler.is_compiling() or graphs.is_captured():
            return
        require_same(named_arguments(module, args, kwargs), self.group)
        for key, hook in list(module._forward_pre_hooks.items()):
            if hook is self:
                del module._forward_pre_hooks[key], module._forward_pre_hooks_with_kwargs[key]


def check_first_inputs(model: nn.Module, group: Group) -> None:
    """From now on the first forward of `model` raises ValueError on all ranks whose inputs are not the same."""
    if group.size > 1 and group.process_group is not None:
        # Before the hooks of others, which may move or cast what they are given.
        model.register_forward_pre_hook(SameInputs(group), prepend=True, with_kwargs=True)


def named_arguments(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that the module's forward has for them."""
    try:
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
    except TypeError:
        # The forward itself says what is wrong with them.
        return {f"argument {number}": value for number, value in enumerate(args)} | kwargs
    return bound.arguments


def require_same(arguments: Mapping[str, Any], group: Group) -> None:
    """The ranks hold the same `arguments`: tensors bit for bit, and numbers and text, at any depth of lists and dicts.

    One all-reduce of two integers where they do.

    Raises:
        ValueError: they do not, on every rank, with the name of the first that differs.
    """
    sums = {name: _checksum(value) for name, value in arguments.items()}
    whole = _number("\n".join(f"{name} {value}" for name, value in sums.items()))
    both = torch.tensor([whole, -whole], dtype=torch.int64, device=group.device)
    highest, lowest = largest(both, group).tolist()
    if highest == -lowest:
        return
    everyone = gather_objects(sums, group)
    names = dict.fromkeys(name for theirs in everyone for name in theirs)
    name = next(name for name in names if len({theirs.get(name) for theirs in everyone}) > 1)
    other = next(rank for rank, theirs in enumerate(everyone) if theirs.get(name) != everyone[0].get(name))
    raise UnlikeInputsError(
        f"rank {other} of {group.size} was given another '{name}' than rank 0: {ALIKE}. (check_inputs=False, where "
        f"the model is sharded, turns this comparison off.)"
    )


def _checksum(value: Any) -> int:
    return _number("\n".join(_parts(value)))


def _number(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def _parts(value: Any) -> Iterator[str]:
    """What a value is made of, as text; objects of other kinds are not looked into."""
    if isinstance(value, torch.Tensor):
        yield f"{tuple(value.shape)} {value.dtype} {_bits(value)}"
    elif value is None or isinstance(value, str | bytes | numbers.Number):
        yield repr(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield f"{key!r}:"
            yield from _parts(item)
    elif isinstance(value, list | tuple):
        yield f"{len(value)} items"
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))


def _bits(x: torch.Tensor) -> int:
    """The sum of a tensor's bytes, each times a number of its place; in integers, which add up alike in any order."""
    if x.is_meta or x.layout is not torch.strided or x.is_quantized:
        return 0
    x = x.detach()
    x = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    # Not contiguous(): an expanded tensor of one element says that it is.
    data = x.new_empty(x.numel()).copy_(x.reshape(-1)).view(torch.uint8)
    places = torch.arange(1, data.numel() + 1, device=x.device)
    return int((data * (places * FACTOR | 1)).sum())
