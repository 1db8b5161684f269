"""Which way a sum over ranks takes: NCCL's own, or in a window of message sizes one that was measured to be faster.

    one_shot, two_shot, multimem    through symmetric memory, see `symmetric.py`
    registered                      NCCL's, of a tensor in registered memory, see `registered.py`

The windows are those of `windows.py`. The first sum that could be in one asks all ranks whether they have the same
GPU, the same table, one host, and what the ways need; where they have not, the way is left out on all of them, with a
line in the log. From then on all ranks choose alike, by what they have in common: a message's dtype and its length.

NCCL's own is taken on a CPU, with `deterministic`, under torch.compile, in sums that are differentiated or started
early, and in a CUDA graph: a graph keeps the address of its buffers, which other sums would use meanwhile, and has a
memory pool of its own.
"""

import hashlib
import logging
import socket
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from . import graphs, registered, symmetric, windows
from .group import Group
from .kernels.backend import constant

logger = logging.getLogger(__name__)

REGISTERED = "registered"
WAYS = (*symmetric.SUMS, REGISTERED)


@constant
def machine(device: torch.device) -> str:
    """The name of a GPU; empty for other devices."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


class Ways:
    """What the ranks of one process group can all do; it keeps no hold of the group."""

    def __init__(self, device: torch.device, size: int, process_group: dist.ProcessGroup) -> None:
        self.device, self.size = device, size
        self.staging: symmetric.Staging | None = None
        self.pool: registered.Pool | None = None
        self.windows = self._alike(process_group)
        for way in WAYS:
            self._agree(self._missing(way, process_group), process_group, way)
        self._prepare(process_group)

    def way(self, dtype: torch.dtype, nbytes: int) -> str | None:
        """The way of a message; None is NCCL's own."""
        for first, last, way in self.windows.get(_name(dtype), ()):
            if first <= nbytes <= last:
                return way if way == REGISTERED or symmetric.fits(dtype, nbytes) else None
        return None

    def _alike(self, process_group: dist.ProcessGroup) -> dict[str, tuple[windows.Window, ...]]:
        """The windows by dtype, if all ranks are alike."""
        digest = hashlib.sha256(repr(sorted(windows.WINDOWS.items())).encode()).hexdigest()
        mine = {"GPU": machine(self.device), "host": socket.gethostname(), "table": digest}
        everyone = _everyone(mine, process_group)
        for what, value in everyone[0].items():
            if any(theirs[what] != value for theirs in everyone):
                logger.warning("sums over %d ranks are NCCL's own: they have not one %s", self.size, what)
                return {}
        return {
            dtype: found
            for (name, size, dtype), found in windows.WINDOWS.items()
            if name == mine["GPU"] and size == self.size
        }

    def _missing(self, way: str, process_group: dist.ProcessGroup) -> str:
        if not self._has(way):
            return ""
        if way == REGISTERED:
            return registered.missing(self.device, process_group)
        return symmetric.missing(way, dist.get_world_size(process_group))

    def _prepare(self, process_group: dist.ProcessGroup) -> None:
        """Takes the memory that the ways need, and leaves out those for which some rank gets none."""

        def make_pool() -> None:
            self.pool = registered.Pool(self.device, process_group)

        self._try(make_pool, process_group, REGISTERED)
        through = tuple(symmetric.SUMS)
        if not self._has(*through):
            return
        nbytes = max(last for found in self.windows.values() for _, last, way in found if way in through)
        staging = self.staging = symmetric.Staging(nbytes, self.device, process_group.group_name)
        # A rank that has no memory left must not leave the others waiting for it.
        for step in (staging.allocate, staging.meet):
            self._try(step, process_group, *through)
        self._agree("" if staging.multicast else "its switch does not multicast", process_group, "multimem")

    def _has(self, *ways: str) -> bool:
        return any(way in ways for found in self.windows.values() for _, _, way in found)

    def _try(self, step: Callable[[], None], process_group: dist.ProcessGroup, *ways: str) -> None:
        """Does a step that the `ways` need, on all ranks or none."""
        if not self._has(*ways):
            return
        problem = ""
        try:
            step()
        except Exception as error:
            problem = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._agree(problem, process_group, *ways)

    def _agree(self, problem: str, process_group: dist.ProcessGroup, *ways: str) -> None:
        """Leaves out the `ways` with which some rank has a problem."""
        if not self._has(*ways):
            return
        everyone = _everyone(problem, process_group)
        rank = next((rank for rank, text in enumerate(everyone) if text), None)
        if rank is None:
            return
        names = " and ".join(way for way in ways if self._has(way))
        logger.warning("sums over %d ranks are NCCL's own, not %s: rank %d: %s", self.size, names, rank, everyone[rank])
        self.windows = {
            dtype: tuple(window for window in found if window[2] not in ways) for dtype, found in self.windows.items()
        }


def _everyone(mine: Any, process_group: dist.ProcessGroup) -> list[Any]:
    # Of the process group itself, which in a trial on one GPU has fewer ranks than its `Group` says.
    values: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(values, mine, group=process_group)
    return values


# By process group, for as long as it lives.
_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, Ways] = weakref.WeakKeyDictionary()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def ways_of(device: torch.device, group: Group) -> Ways | None:
    """The ways of a group for tensors on `device`; None where NCCL's own is the only one. All ranks call it."""
    if not windows.WINDOWS or torch.compiler.is_compiling() or group.deterministic or group.process_group is None:
        return None
    if not machine(device) or graphs.is_captured():
        return None
    found = _KNOWN.get(group.process_group)
    if found is None:
        found = _KNOWN[group.process_group] = Ways(device, group.size, group.process_group)
    return found


def summed(x: torch.Tensor, group: Group) -> bool:
    """Whether the ranks' contiguous `x` has been summed in place, in a way other than NCCL's."""
    ways = ways_of(x.device, group) if x.is_contiguous() else None
    way = ways.way(x.dtype, x.nbytes) if ways is not None else None
    if ways is None or way is None or way == REGISTERED:
        return False
    assert ways.staging is not None
    ways.staging.sum(way, x)
    return True


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Group) -> torch.Tensor | None:
    """Registered memory for what is summed, if its window says so; None: any memory will do."""
    ways = ways_of(device, group)
    if ways is None or ways.pool is None:
        return None
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    return ways.pool.empty(shape, dtype) if ways.way(dtype, nbytes) == REGISTERED else None
