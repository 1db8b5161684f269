"""Symmetric and registered memory, and a GPU's name, as CPU ranks can have them: what chooses between them is real."""

import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from tp_layers import registered, symmetric, ways, windows

GPU = "a fake GPU"


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
