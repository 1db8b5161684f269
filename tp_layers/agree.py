"""What all ranks must do alike or not at all: a rank that fails alone would leave the others in the next collective."""

import hashlib
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import nn

from .collectives import broadcast_text, gather_objects
from .group import Group
from .plans.resolve import Resolved
from .plans.styles import label

Result = TypeVar("Result")


class Alarm:
    """Lets ranks that each work by themselves for long notice soon that another one has failed.

    All ranks make it together. It goes through the group's store, which takes no turn in the order of the collectives.
    """

    # A look at the store is a round trip to rank 0's machine.
    SECONDS = 0.5

    def __init__(self, group: Group) -> None:
        self._key = "tp_layers/" + broadcast_text(uuid.uuid4().hex, group)
        self._store = group.process_group.get_group_store() if group.process_group is not None else None
        self._next = time.monotonic() + self.SECONDS

    def ring(self, message: str) -> None:
        """Tells the others."""
        if self._store is not None:
            self._store.set(self._key, message)

    def check(self) -> None:
        """Raises ValueError if another rank has rung; looks every `SECONDS`."""
        if self._store is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.SECONDS
        if self._store.check([self._key]):
            raise ValueError(self._store.get(self._key).decode())


def agreed(
    group: Group,
    function: Callable[[], Result],
    facts: Callable[[Result], Any] = lambda result: None,
    alarm: Alarm | None = None,
) -> Result:
    """`function()` on every rank, once all of them have done it and found the same `facts` of its result.

    With an `alarm`, which `function` checks as it goes, no rank works on for long after another has failed.

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
        if alarm is not None:
            alarm.ring(f"rank {group.rank} of {group.size} failed: {found[0]}")
    everyone = gather_objects(found, group)
    if error is not None:
        raise error
    for rank, (problem, others) in enumerate(everyone):
        if problem is not None:
            raise ValueError(f"rank {rank} of {group.size} failed: {problem}")
        if others != found[1]:
            raise ValueError(
                f"rank {rank} of {group.size} has another model, checkpoint, plan or size than rank {group.rank}"
            )
    return result


def fingerprint(model: nn.Module, resolved: Resolved, others: Sequence[str] = ()) -> str:
    """A digest of the model's class, its parameters' names, shapes and dtypes, the resolved plan, and `others`."""
    parts = [type(model).__name__, str(resolved.size), str(resolved.specs), *others]
    parts += [f"{path}: {label(style)}" for path, style in resolved.styles.items()]
    parts += [f"{name}: {tuple(value.shape)} {value.dtype}" for name, value in model.named_parameters()]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()
