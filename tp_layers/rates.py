"""How fast the ranks of a group compute and communicate, measured, and what follows for the chunks of a sum."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from .collectives import all_reduce, largest
from .group import Group

CHUNKS = (1, 2, 4, 8, 16)
# Fewer rows of a GEMM leave processors idle.
FEWEST_ROWS = 32
# What is predicted must be better by this, or it is noise.
GAIN = 1.05


@dataclass(frozen=True)
class Rates:
    """What the slowest rank does in a second: `flops` of a GEMM, `transfer` bytes of a tensor that is all-reduced.

    `latency`: seconds of the shortest all-reduce. `weights`: elements of a weight that a GEMM of few rows goes through,
    which every chunk does anew.
    """

    flops: float
    latency: float
    transfer: float
    weights: float = math.inf

    def seconds(self, chunks: int, rows: int, width: int, columns: int, itemsize: int) -> float:
        """Of `[rows, width]` computed from `columns` columns and all-reduced, in equal chunks of rows."""
        gemm = width * columns * (2 * rows / chunks / self.flops + 1 / self.weights)
        reduce = self.latency + rows * width * itemsize / self.transfer / chunks
        return gemm + (chunks - 1) * max(gemm, reduce) + reduce

    def chunks(self, rows: int, width: int, columns: int, itemsize: int) -> int:
        """The number of chunks that takes least; 1 where others gain nothing to speak of."""
        fit = [count for count in CHUNKS if count == 1 or rows // count >= FEWEST_ROWS]
        best = min(fit, key=lambda count: self.seconds(count, rows, width, columns, itemsize))
        whole, chunked = (self.seconds(count, rows, width, columns, itemsize) for count in (1, best))
        return best if whole > GAIN * chunked else 1


def measure(group: Group, dtype: torch.dtype, width: int = 2048, rows: int = 256, rounds: int = 5) -> Rates:
    """The rates of `group` for models in `dtype`, by two GEMMs and two all-reduces. All ranks call it.

    The ranks meet in each round, and the median over rounds of the slowest rank's times counts.
    """
    few = max(rows // 16, 1)
    x, weight = (torch.ones(count, width, dtype=dtype, device=group.device) for count in (rows, width))
    # Longer than what a link or a switch may buffer.
    short, large = all_reduce(x[:1, :1].clone(), group), x.clone()
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: x @ weight,
        lambda: x[:few] @ weight,
        lambda: all_reduce(short.zero_(), group),
        lambda: all_reduce(large.zero_(), group),
    ]
    seconds = [[_timed(way, group) for way in ways] for _ in range(rounds + 1)]
    slowest = largest(torch.tensor(seconds[1:], dtype=torch.float64, device=group.device), group).tolist()
    many, little, latency, transfer = (median(column) for column in zip(*slowest, strict=True))
    per_row = max(many - little, 1e-9) / (rows - few)
    return Rates(
        flops=2 * width * width / per_row,
        latency=latency,
        transfer=large.nbytes / max(transfer - latency, 1e-9),
        weights=width * width / max(little - few * per_row, 1e-9),
    )


def _timed(run: Callable[[], torch.Tensor], group: Group) -> float:
    """Seconds of `run`, from when all ranks are ready for it."""
    largest(torch.zeros(1, device=group.device), group)
    _finish(group)
    start = time.perf_counter()
    run()
    _finish(group)
    return time.perf_counter() - start


def _finish(group: Group) -> None:
    if group.device.type != "cpu":
        torch.accelerator.synchronize(group.device)
