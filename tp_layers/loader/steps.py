"""Steps that can fail on one rank alone: all ranks stop at the same one, and all raise."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ..exchange import gather_objects, largest
from ..group import Group


class Steps:
    """What one rank did of a work that all ranks do together. After its first failure it does nothing more.

    A rank that has failed still takes part in `failed` and `settle`, so that no other waits for it.
    """

    def __init__(self, group: Group, work: str) -> None:
        self._group, self._work = group, work
        self._error: Exception | None = None

    def attempt(self, function: Callable[..., Any], *args: Any) -> Any:
        """`function(*args)`; None if it, or an earlier step, failed on this rank."""
        if self._error is not None:
            return None
        try:
            return function(*args)
        except Exception as error:
            self._error = error
            return None

    def failed(self) -> bool:
        """Whether any rank has failed. One all-reduce of one number: there is one for every tensor that is saved."""
        mine = torch.tensor([self._error is not None], dtype=torch.int32, device=self._group.device)
        return bool(largest(mine, self._group).item())

    def settle(self, undo: Callable[[], object] = lambda: None) -> None:
        """Returns on every rank, or on every rank does `undo` and raises.

        Raises:
            OSError: a rank failed; every rank that did is named, with what it said.
        """
        error = self._error
        message = None if error is None else f"{type(error).__name__}: {error}"
        messages = enumerate(gather_objects(message, self._group))
        failures = [f"rank {rank} of {self._group.size}: {text}" for rank, text in messages if text is not None]
        if failures:
            with suppress(OSError):
                undo()
            raise OSError(f"{self._work}: {'; '.join(failures)}") from error
