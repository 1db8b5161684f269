"""A process group of a sharded model's own, over the caller's ranks, in which a wait ends when another rank has failed.

Who waits for longer than a second looks, each second, into the group's store:

    raises      it says why in the store (`failure.py`), where the others find it
    dies        gloo tells those it is connected to, who call the roll; who waits, answers; who does not, is named

A slow rank is no failure, and a healthy forward does not touch the store. After a failure the process group is not
used again, so that sums under way there disturb nobody: the caller's own is as it was. (They keep their process from
ending until the rank that raised has ended, or the timeout is over.) It stays registered with torch, which makes names
of the number of process groups. Where all ranks raised by themselves, their next forward makes a new one.

Only for gloo, where a wait that has timed out can be repeated. Not within compiled code, nor for sums that are put off
(`all_reduce_later`): there gloo alone ends a wait, when the other process ends or at the timeout.
"""

import contextlib
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from .group import Group

BETWEEN_LOOKS = timedelta(seconds=1)
# Looks for answers to the roll, and seconds between them. Counted: a machine that slept must not find all others dead.
ROLL_LOOKS, ROLL_PAUSE = 40, 0.1
# Of a rank that raised only because another one had failed.
NOT_OWN = b"-"


class Link:
    """The process group over which the models sharded over one of the caller's talk; made anew after a failure.

    `cause`: why it cannot be used; empty if it can. `generation`: how many there have been.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.generation = rank, size, 0
        # Forwards that have begun.
        self.calls = 0
        self.cause = "there has been no link yet"
        self._process_group: dist.ProcessGroup | None = None
        self._store: Any = None

    def open(self, process_group: dist.ProcessGroup, generation: int) -> None:
        """From now on all goes over `process_group`."""
        self._process_group, self._store = process_group, process_group.get_group_store()
        self.cause, self.generation, self.calls = "", generation, 0

    def require(self) -> dist.ProcessGroup:
        """The process group.

        Raises:
            RuntimeError: a rank has failed.
        """
        if self.cause or self._process_group is None:
            raise RuntimeError(f"this model cannot run, as {self.cause}; shard or load it again, on every rank")
        return self._process_group

    def wait(self, work: Any) -> None:
        """Waits for a collective.

        Raises:
            RuntimeError: a rank has failed, and which; or the process group's timeout is over.
        """
        ended = False
        while True:
            try:
                work.wait(BETWEEN_LOOKS)
                return
            except RuntimeError as error:
                if ended:
                    raise RuntimeError(self.lost(error)) from error
            # If it ended, then well or not: the next wait tells. (The message of one that timed out is not documented.)
            ended = work.is_completed()
            if not ended:
                self._look()

    def told(self, error: BaseException) -> str:
        """Closes the link and tells the others that `error` is why; returns what was told first, by any rank."""
        return self._closed(lambda: self._tell(self._named(error)), own=True)

    def lost(self, error: BaseException) -> str:
        """Closes the link, on which gloo failed; returns why: what a rank told, or who does not answer."""
        return self._closed(lambda: self._call_the_roll() or self._tell(self._named(error)))

    def all_raised(self) -> bool:
        """Whether every rank raised by itself in the same forward, as for an argument that none can take."""
        keys = [f"raised/{rank}" for rank in range(self.size)]
        with contextlib.suppress(RuntimeError):
            for _ in range(ROLL_LOOKS):
                if self._store.check(keys) or self._store.check(["again"]):
                    break
                time.sleep(ROLL_PAUSE)
            found = {self._store.get(key) for key in keys} if self._store.check(keys) else {NOT_OWN}
            # What the first rank finds holds for all.
            alike = b"yes" if len(found) == 1 and NOT_OWN not in found else b"no"
            return self._store.compare_set("again", "", alike.decode()) == b"yes"  # type: ignore[no-any-return]
        return False

    def _closed(self, find: Callable[[], str], own: bool = False) -> str:
        if not self.cause:
            try:
                self.cause = find()
                if self.cause:
                    self._store.set(f"raised/{self.rank}", str(self.calls) if own else NOT_OWN.decode())
            except RuntimeError as problem:
                # torch adds where in its own code.
                (first, *_), who = str(problem).split("\n"), "rank 0 of the default process group, which keeps it"
                self.cause = f"the store is lost, and most likely {who}, has died ({first})"
        return self.cause

    def _look(self) -> None:
        if self._closed(self._heard_or_answered):
            raise RuntimeError(self.cause)

    def _heard_or_answered(self) -> str:
        if self._store.check(["roll"]):
            self._store.set(f"here/{self.rank}", "")
        return self._heard()

    def _named(self, error: BaseException) -> str:
        return f"rank {self.rank} of {self.size} failed: {type(error).__name__}: {error}"

    def _tell(self, message: str) -> str:
        return self._store.compare_set("failed", "", message).decode()  # type: ignore[no-any-return]

    def _heard(self) -> str:
        return self._store.get("failed").decode() if self._store.check(["failed"]) else ""

    def _call_the_roll(self) -> str:
        """What a rank has told, else who does not answer; empty if all do."""
        self._store.set(f"here/{self.rank}", "")
        self._store.set("roll", "")
        silent = list(range(self.size))
        for _ in range(ROLL_LOOKS):
            silent = [rank for rank in silent if not self._store.check([f"here/{rank}"])]
            if self._heard() or not silent:
                return self._heard()
            time.sleep(ROLL_PAUSE)
        return self._tell(f"{' or '.join(f'rank {rank}' for rank in silent)} of {self.size} died, or does not answer")


def run(collective: Callable[..., Any], *args: Any, group: "Group") -> None:
    """`collective(*args)` over the group's channel, to its end; see `Link.wait` for what it raises."""
    if group.link is None or torch.compiler.is_compiling():
        collective(*args, group=group.channel)
    else:
        group.link.wait(collective(*args, group=group.channel, async_op=True))
