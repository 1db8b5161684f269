"""Has a sharded model's forward end on all ranks where it raises on one; how, `link.py` says.

Only a call of the model itself is watched: not one of a part of it, not a backward, and not a model that is compiled as
a whole. There, as within compiled blocks, the others notice a rank that raises when its process ends. On NCCL nothing
is done: torch's own watchdog ends a rank that waits for too long, and torchrun ends the others of one that has ended.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from .exchange import gather_objects
from .group import Group
from .inputs import UnlikeInputsError
from .link import Link

logger = logging.getLogger(__name__)

# By the caller's process group.
_LINKS: WeakKeyDictionary[dist.ProcessGroup, Link] = WeakKeyDictionary()
# By the default process group: the ranks and numbers that torch has made names of our process groups from.
_NAMED: WeakKeyDictionary[Any, set[tuple[tuple[int, ...], int]]] = WeakKeyDictionary()


def protect(group: Group) -> Group:
    """`group` with a link: one for all models over its process group, made anew if a rank has failed.

    All ranks call it. A group that does not talk over gloo stays as it is, and so does one whose ranks know unlike
    numbers of process groups: torch would give the new one another name on each of them, and they would not meet.
    """
    ours = group.process_group
    if ours is None or group.size == 1 or dist.get_backend(ours) != "gloo":
        return group
    link = _LINKS.setdefault(ours, Link(group.rank, group.size))
    ranks = dist.get_process_group_ranks(ours)
    # There is no public way to ask; it is only read.
    number = len(distributed_c10d._world.pg_names)
    used = _NAMED.setdefault(dist.group.WORLD, set())
    usable = ranks == sorted(ranks) and (tuple(ranks), number) not in used
    found = gather_objects((link.generation, not link.cause, number, usable), group)
    if len({(generation, is_open) for generation, is_open, _, _ in found}) == 1 and not link.cause:
        return replace(group, link=link)
    # A rank that had not heard of the failure.
    link.cause = link.cause or "another rank has failed"
    if len({number for _, _, number, _ in found}) > 1 or not all(usable for *_, usable in found):
        logger.info("the ranks know unlike process groups: one that fails is noticed when its process ends")
        return replace(group, link=None)
    used.add((tuple(ranks), number))
    with _unhurried():
        made = dist.new_group(ranks, _timeout(ours), "gloo", use_local_synchronization=True)
    link.open(made, max(generation for generation, *_ in found) + 1)
    return replace(group, link=link)


def _timeout(group: dist.ProcessGroup) -> Any:
    """As the caller's, for which there is no public name; else torch's default."""
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    return getattr(options, "_timeout", None)


@contextlib.contextmanager
def _unhurried() -> Iterator[None]:
    """Threads that this one starts meanwhile interrupt no other when they wake up, on Linux.

    gloo's thread for the network does not wait for a connection that another thread of its holds, but asks for it over
    and over. If it has interrupted that very thread, until the scheduler's next tick: of two ranks on two cores every
    fourth sum took 2 to 5 ms instead of 0.6, and a step of FLUX.2 (`bench/step.py`) 1.15 times as long.
    """
    is_set = False
    # No privilege is needed, but a sandbox may forbid it.
    with contextlib.suppress(OSError):
        if sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER:
            # Of the calling thread alone; those that it starts inherit it.
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            is_set = True
    try:
        yield
    finally:
        if is_set:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def watch_failures(model: nn.Module, group: Group) -> None:
    """From now on a call of `model` that raises on one rank raises on all, and names it."""
    if group.link is not None:
        watch = _Watch(group)
        # Before all other hooks, which may raise.
        model.register_forward_pre_hook(watch.begin, prepend=True)
        model.register_forward_hook(watch.end, always_call=True)


class _Watch:
    def __init__(self, group: Group) -> None:
        self.group = group
        # Of each call under way, the exception that its caller was handling already.
        self._before: list[BaseException | None] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Watch":
        return _Watch(self.group)

    def begin(self, model: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        self._before.append(sys.exc_info()[1])
        link = self.group.link
        assert link is not None
        if link.cause and link.all_raised():
            protect(self.group)
        link.require()
        link.calls += 1

    def end(self, model: nn.Module, *args: Any) -> None:
        if torch.compiler.is_compiling() or not self._before:
            return
        error, before, link = sys.exc_info()[1], self._before.pop(), self.group.link
        assert link is not None
        if error is None or error is before or link.cause or isinstance(error, UnlikeInputsError):
            return
        # Of gloo outside of a link, as in compiled code: another rank's failure is why.
        of_gloo = isinstance(error, RuntimeError) and "gloo" in str(error)
        error.add_note(link.lost(error) if of_gloo else link.told(error))
