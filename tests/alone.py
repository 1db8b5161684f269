"""One process that passes for a rank of two: the layers' real collectives on a single device, a GPU or the CPU.

The process group has one rank, the `Group` says two, so a layer takes its half and launches what it would launch. Its
sums come back as they were, or doubled where `Doubled` stands in for a second rank with the same numbers. Under NCCL
the doubling is part of the reduction: NCCL launches nothing for a plain sum over one rank in place.
"""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tp_layers.group import Group

# Every test of a GPU runs on the CPU too, which shows the test itself to be right; there without the kernels, which
# would need the interpreter, and that another process.
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="gpu", marks=pytest.mark.gpu)]
WAYS = [
    pytest.param("cpu", "torch", id="cpu-torch"),
    pytest.param("cuda", "torch", id="gpu-torch", marks=pytest.mark.gpu),
    pytest.param("cuda", "triton", id="gpu-triton", marks=pytest.mark.gpu),
]
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
SIZE = 2


@contextmanager
def one_rank(device: str) -> Iterator[dist.ProcessGroup]:
    """The default process group of this process alone, for the time of the block."""
    assert not dist.is_initialized()
    where = torch.device(device, torch.cuda.current_device()) if device == "cuda" else None
    with tempfile.TemporaryDirectory() as folder:
        with pytest.MonkeyPatch.context() as patch:
            # The host's name need not resolve.
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
            store = dist.FileStore(f"{folder}/store", 1)
            dist.init_process_group(BACKENDS[device], store=store, rank=0, world_size=1, device_id=where)
        try:
            yield dist.group.WORLD
        finally:
            forget_graphs()
            dist.destroy_process_group()


def half(rank: int, process_group: dist.ProcessGroup) -> Group:
    """Rank `rank` of two, whose collectives meet nobody."""
    return Group(rank, SIZE, Group.of(process_group).device, process_group)


_graphs: list[torch.cuda.CUDAGraph] = []


def forget_graphs() -> None:
    """Ends the graphs that `captured` made."""
    while _graphs:
        _graphs.pop().reset()


class Done:
    """The work of a collective that is done."""

    def wait(self) -> None:
        pass


class Doubled:
    """For the time of the block `dist.all_reduce` sums each rank twice; `calls` says how each was asked for."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self._patch, self._original = pytest.MonkeyPatch(), dist.all_reduce

    def __enter__(self) -> "Doubled":
        self._patch.setattr(dist, "all_reduce", self._reduce)
        return self

    def __exit__(self, *error: object) -> None:
        self._patch.undo()

    def _reduce(self, x: torch.Tensor, group: Any = None, async_op: bool = False) -> Any:
        self.calls.append("started" if async_op else "waited for")
        if x.is_cuda:
            return self._original(x, dist._make_nccl_premul_sum(2.0), group=group, async_op=async_op)
        self._original(x, group=group)
        x.mul_(2)
        return Done() if async_op else None


def captured(run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """`run` as a CUDA graph captured with inputs like `x`, to be replayed with others; on the CPU `run` itself.

    NCCL does not let go of a communicator that a graph holds, so `forget_graphs` comes before the end of the group.
    """
    if not x.is_cuda:
        return run
    static, side = x.clone(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Compiles kernels, starts NCCL, and compares the first inputs: none of it can be captured.
        for _ in range(2):
            run(static)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    _graphs.append(graph)
    with torch.cuda.graph(graph):
        y = run(static)

    def replay(new: torch.Tensor) -> torch.Tensor:
        static.copy_(new)
        graph.replay()
        return y.clone()

    return replay
