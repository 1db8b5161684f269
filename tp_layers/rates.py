"""How fast the ranks of a group compute and communicate, measured, and what follows for the chunks of a sum."""

import functools
import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from .collectives import all_reduce
from .exchange import largest
from .group import Group
from .under_way import start_all_reduce

CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16)
# Fewer columns of an output leave processors idle.
FEWEST_COLUMNS = 128
# What is predicted must be better by this, or it is noise. Over 1 Gbit/s, 1.05 left layers whole that chunks made 1.17
# times as fast.
GAIN = 1.03
# All-reduces, of which all but the first are further ones.
AT_ONCE = 6
# How chunks may grow: by these powers of the growth with which each chunk's GEMM would take as long as the reduction of
# the one before. With power 1 one reduction at a time is under way, and the first starts late: over 1 Gbit/s, where a
# GEMM took 1.5 times as long as its reduction, 4 such chunks took 0.77 of the whole's time, 6 with power 0.5 0.72.
POWERS = (0.5, 0.25, 0.0)
# The most that this growth, or its inverse, may be.
STEEPEST = 2.0
# Columns of which a chunk is a multiple, but for the last one: whole tiles of a GEMM on a GPU (64) and of MKL's with
# AVX-512 (48), where 4 chunks of other widths took 1.04 times as long as the whole, and those 1.025.
MULTIPLE = 192


@dataclass(frozen=True)
class Rates:
    """What the slowest rank does in a second: `flops` of a GEMM, `transfer` bytes of a tensor that is all-reduced.

    `latency`: seconds of the shortest all-reduce. `weights`: elements of an operand that a GEMM goes through, whose
    other operand is small. `hidden`: of the shorter of a GEMM and one all-reduce at one time, the part that costs
    nothing; what moves the bytes may be the processor that computes. `further`: seconds that an all-reduce, however
    short, adds to another one under way; None for the latency.
    """

    flops: float
    latency: float
    transfer: float
    weights: float = math.inf
    hidden: float = 1.0
    further: float | None = None

    def widths(self, rows: int, width: int, columns: int, itemsize: int) -> list[int]:
        """The chunks, of their widths in turn, that take least for `[rows, width]` computed from `columns` columns.

        One where others gain nothing to speak of. But for the rounding to whole tiles they are equal, or grow from one
        to the next where reductions take longer, so that the first starts early, or shrink where GEMMs take longer, so
        that the last, behind which nothing is computed, is short.
        """
        return _best(self, rows, width, columns, itemsize)

    def seconds(self, widths: Sequence[int], rows: int, width: int, columns: int, itemsize: int) -> float:
        """Of the same in chunks of these widths."""
        gemms, reductions = self._whole(rows, width, columns, itemsize)
        gemm = [gemms * part / width for part in widths]
        # Each chunk but the first goes through the input anew.
        gemm[1:] = [seconds + rows * columns / self.weights for seconds in gemm[1:]]
        further = self.latency if self.further is None else self.further
        reduction = [further + reductions * part / width for part in widths[:-1]]
        reduction.append(self.latency + reductions * widths[-1] / width)
        # When all that has been started is computed, and when it is reduced.
        computed, reduced = gemm[0], 0.0
        for compute, reduce in zip(gemm[1:], reduction[:-1], strict=True):
            late = max(reduced - computed, 0.0)
            # Of two under way at one time each fills the other's gaps, in which it waits for a processor.
            two = min(late / compute, 1.0) if compute else 1.0
            lost = (1 - self.hidden) * (1 - self.hidden * two) * min(compute, late + reduce)
            reduced = computed + late + reduce + lost
            computed += compute + lost
        copied = rows * width / self.weights if len(widths) > 1 else 0.0
        return max(computed, reduced) + reduction[-1] + copied

    def _whole(self, rows: int, width: int, columns: int, itemsize: int) -> tuple[float, float]:
        """Seconds of the whole GEMM and of moving its result."""
        gemm = width * columns * (2 * rows / self.flops + 1 / self.weights)
        return gemm, rows * width * itemsize / self.transfer

    def _growth(self, rows: int, width: int, columns: int, itemsize: int) -> float:
        """Of each chunk over the one before it, whose reduction, and its own slowed GEMM, then take the same time."""
        gemm, reduction = self._whole(rows, width, columns, itemsize)
        slowed = gemm + (1 - self.hidden) * min(gemm, reduction)
        return min(max(reduction, slowed / STEEPEST) / slowed, STEEPEST) if slowed else 1.0


def _widths(count: int, growth: float, width: int) -> list[int]:
    shares = [growth**number for number in range(count)]
    ends = [round(width / MULTIPLE * part / sum(shares)) * MULTIPLE for part in itertools.accumulate(shares)]
    return [stop - start for start, stop in itertools.pairwise([0, *ends[:-1], width])]


# Every layer asks in every call: 0.3 milliseconds to work out, 0.3 microseconds to remember.
@functools.lru_cache(maxsize=1024)
def _best(rates: Rates, *shape: int) -> list[int]:
    rows, width, columns, itemsize = shape
    growth = rates._growth(*shape)
    ways = [_widths(count, growth**power, width) for power in POWERS for count in CHUNKS]
    fit = [widths for widths in ways if len(widths) == 1 or min(widths) >= FEWEST_COLUMNS]
    best = min(fit, key=lambda widths: rates.seconds(widths, rows, width, columns, itemsize))
    chunked, whole = (rates.seconds(widths, rows, width, columns, itemsize) for widths in (best, [width]))
    return best if whole > GAIN * chunked else [width]


def measure(group: Group, dtype: torch.dtype, width: int = 2048, rows: int = 256, rounds: int = 7) -> Rates:
    """The rates of `group` for models in `dtype`, by two GEMMs, all-reduces alone and at once, and one of each.

    All ranks call it. They meet in each round, and the median over rounds of the slowest rank's times counts.
    """
    few = max(rows // 16, 1)
    x, weight = (torch.ones(count, width, dtype=dtype, device=group.device) for count in (rows, width))
    # Longer than what a link or a switch may buffer.
    short, large = all_reduce(x[:1, :1].clone(), group), x.clone()
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: x @ weight,
        lambda: x[:few] @ weight,
        lambda: all_reduce(short.zero_(), group),
        lambda: _at_once(short, group),
        lambda: all_reduce(large.zero_(), group),
    ]
    medians = (median(column) for column in zip(*_slowest(ways, group, rounds), strict=True))
    many, little, latency, several, transfer = medians
    per_row = max(many - little, 1e-9) / (rows - few)
    # Of two that take unlike times the noise of the longer would hide what becomes of the shorter: a GEMM 2.5 times as
    # long as the reduction gave 0.45 to 0.96 over one link, one as long 0.65 to 0.86. Whole 16 bytes, which GEMMs like.
    inner = min(width, max(8, int(width * transfer / many) // 8 * 8))
    alike = large[: max(1, min(rows, int(rows * many / transfer)))]
    return Rates(
        flops=2 * width * width / per_row,
        latency=latency,
        transfer=large.nbytes / max(transfer - latency, 1e-9),
        weights=width * width / max(little - few * per_row, 1e-9),
        hidden=_measure_hidden(x[:, :inner], weight[:inner], alike, group, rounds),
        further=min(max(several - latency, 0.0) / (AT_ONCE - 1), latency),
    )


def _at_once(short: torch.Tensor, group: Group) -> torch.Tensor:
    """Some reductions that are under way together."""
    waits = [start_all_reduce(torch.zeros_like(short), group) for _ in range(AT_ONCE)]
    return [wait() for wait in waits][-1]


def _measure_hidden(x: torch.Tensor, weight: torch.Tensor, sent: torch.Tensor, group: Group, rounds: int) -> float:
    """Of a GEMM of `x` and `weight` and a reduction of what is `sent`."""

    def both() -> torch.Tensor:
        wait = start_all_reduce(sent.zero_(), group)
        torch.mm(x, weight)
        return wait()

    ways: list[Callable[[], torch.Tensor]] = [lambda: x @ weight, lambda: all_reduce(sent.zero_(), group), both]
    return median(_hidden(*seconds) for seconds in _slowest(ways, group, 2 * rounds - 1))


def _slowest(ways: Sequence[Callable[[], torch.Tensor]], group: Group, rounds: int) -> list[list[float]]:
    """The slowest rank's seconds of each way in each round, in each in another order; the first does not count."""
    seconds = []
    for number in range(rounds + 1):
        order = random.Random(number).sample(range(len(ways)), len(ways))
        taken = {way: _timed(ways[way], group) for way in order}
        seconds.append([taken[way] for way in range(len(ways))])
    return largest(torch.tensor(seconds[1:], dtype=torch.float64, device=group.device), group).tolist()


def _hidden(gemm: float, reduce: float, at_once: float) -> float:
    return min(max((gemm + reduce - at_once) / min(gemm, reduce), 0.0), 1.0)


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
