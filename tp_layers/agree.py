"""What all ranks must do alike or not at all: a rank that fails alone would leave the others in the next collective."""

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from .collectives import gather_objects
from .group import Group
from .plans.resolve import Resolved
from .plans.styles import label

Result = TypeVar("Result")


def agreed(
    group: Group, function: Callable[[], Result], facts: Callable[[Result], Any] = lambda result: None
) -> Result:
    """`function()` on every rank, once all of them have done it and found the same `facts` of its result.

    Raises:
        Exception: what `function` raised on this rank.
        ValueError: another rank raised (its message is told), or found other facts.
    """
    error: Exception | None = None
    found: tuple[str | None, Any]
    try:
        result = function()
        found = (None, facts(result))
    except Exception as raised:
        error, found = raised, (f"{type(raised).__name__}: {raised}", None)
    everyone = gather_objects(found, group)
    if error is not None:
        raise error
    for rank, (problem, others) in enumerate(everyone):
        if problem is not None:
            raise ValueError(f"rank {rank} of {group.size} failed: {problem}")
        if others != found[1]:
            raise ValueError(f"rank {rank} of {group.size} has another model, plan or size than rank {group.rank}")
    return result


def fingerprint(model: nn.Module, resolved: Resolved) -> str:
    """A digest of the model's class, its parameters' names, shapes and dtypes, and the resolved plan."""
    parts = [type(model).__name__, str(resolved.size), str(resolved.specs)]
    parts += [f"{path}: {label(style)}" for path, style in resolved.styles.items()]
    parts += [f"{name}: {tuple(value.shape)} {value.dtype}" for name, value in model.named_parameters()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
