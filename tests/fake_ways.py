"""Symmetric and registered memory, and a GPU's name, as CPU ranks can have them: what chooses between them is real."""

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from seeded import per_rank
from tp_layers import registered, symmetric, ways, windows
from tp_layers.collectives import all_reduce
from tp_layers.group import Group

GPU = "a fake GPU"
WINDOWS = ((64, 512, "one_shot"), (528, 1024, "two_shot"), (2048, 2048, "multimem"), (4096, 8192, "registered"))


def table(size: int, found: Sequence[windows.Window] = WINDOWS, dtype: str = "float32") -> dict[Any, Any]:
    return {(GPU, size, dtype): tuple(found)}


class FakeWays:
    """For the time of the block CPU ranks pass for GPUs of that name, with `table` as the windows.

    `calls` has the way of each sum that was not the process group's own, "own" for each that was, and "memory" for each
    tensor of registered memory.
    """

    def __init__(self, table: dict[tuple[str, int, str], Any]) -> None:
        self.table, self.calls, self.original = table, [], dist.all_reduce

    def __enter__(self) -> "FakeWays":
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(windows, "WINDOWS", self.table)
        self.patch.setattr(ways, "machine", lambda device: GPU)
        self.patch.setattr(ways, "_KNOWN", weakref.WeakKeyDictionary())
        self.patch.setattr(registered, "missing", lambda device, process_group: "")
        self.patch.setattr(registered, "Pool", self._pool)
        # On one rank, which passes for one of two, what stands in for torch's sum can do it.
        self.patch.setattr(symmetric, "TWO_SHOT_SIZES", (1, *symmetric.TWO_SHOT_SIZES))
        self.patch.setattr(symmetric.Staging, "allocate", allocate)
        self.patch.setattr(symmetric.Staging, "meet", meet)
        for way in symmetric.SUMS:
            self.patch.setitem(symmetric.SUMS, way, self._sum(way))
        self.patch.setattr(dist, "all_reduce", self._own)
        return self

    def __exit__(self, *error: object) -> None:
        self.patch.undo()

    def _own(self, *args: Any, **how: Any) -> Any:
        self.calls.append("own")
        return self.original(*args, **how)

    def _sum(self, way: str) -> symmetric.Sum:
        def run(buffer: torch.Tensor, x: torch.Tensor, name: str) -> None:
            assert buffer.shape == x.shape and buffer.dtype == x.dtype and x.data_ptr() % symmetric.ALIGNMENT == 0
            self.calls.append(way)
            buffer.copy_(x)
            self.original(buffer, group=_resolve_process_group(name))
            x.copy_(buffer)

        return run

    def _pool(self, device: torch.device, process_group: dist.ProcessGroup) -> "FakeWays":
        return self

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        self.calls.append("memory")
        return torch.full(shape, torch.nan, dtype=dtype)


def allocate(staging: symmetric.Staging) -> None:
    with torch.inference_mode(False):
        staging.buffer = torch.full((staging.nbytes,), 85, dtype=torch.uint8)


def meet(staging: symmetric.Staging) -> None:
    staging.multicast = True


def reduced(group: Group, dtype: torch.dtype, lengths: Sequence[int], of: dict[Any, Any]) -> list[str]:
    """The way of a sum of each length, which must be right and in place."""
    with FakeWays(of) as fake:
        for length in lengths:
            terms = per_rank((length,), group.size, length, dtype)
            x = terms[group.rank].clone()
            assert all_reduce(x, group) is x and torch.equal(x, sum(terms)), length
        return fake.calls
