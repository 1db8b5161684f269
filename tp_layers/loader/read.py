"""From a file straight into a shard: each rank reads the ranges its spec gives, and no full tensor exists.

    shard                                    how
    whole tensor, or cut along dim 0         its rows, read to their place
    cut along a later dim, wide gaps         each run to its place, by a read of its own
    cut along a later dim, narrow gaps       whole rows, once: the runs to their places, the rest where nobody looks

That is for a shard in CPU memory and in the file's dtype; others are put together in pieces, in staging buffers, in the
same way. Reads, not mappings: a file cut short under a mapping ends the process, under a read it is an error.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..plans.spec import Range
from .ahead import Ahead
from .index import is_same, open_file
from .parts import Part
from .pieces import after, consecutive, packed, rows
from .staging import STAGE_BYTES, Staging

# Reading this much between two runs along with them takes as long as a read of its own (1.2 microseconds).
CALL_BYTES = 12 << 10
# What one read fills at most, in pieces: the system's own limit (IOV_MAX).
PIECES = 1024
# After each of these the caller hears of it.
TICK_BYTES = 4 << 20
# Memory is faster than this, bytes per second: what comes slower comes from a disk, and is announced to it.
DISK_RATE = 1e9


class Job(NamedTuple):
    """Reads `part` of the stored tensor `name` into the contiguous `target`, this rank's shard of it."""

    name: str
    part: Part
    target: torch.Tensor


def nothing(count: int) -> None:
    """Takes note of nothing."""


def read_shards(jobs: Sequence[Job], rank: int, tick: Callable[[int], object] = nothing) -> int:
    """Carries out all `jobs`, best in the order of the files, and returns the bytes it asked the files for.

    `tick` is told each number of bytes that has been read, every few MiB; what it raises ends the reading.

    Raises:
        OSError: a file ends early or cannot be read; with the rank, the file, the tensor and the offset.
    """
    reader = Reader(jobs, rank, tick)
    try:
        reader.run()
    finally:
        reader.close()
    return reader.requested


class Reader:
    """What `read_shards` works with: the open file and the buffers."""

    def __init__(self, jobs: Sequence[Job], rank: int, tick: Callable[[int], object]) -> None:
        self.jobs, self.rank, self.tick = jobs, rank, tick
        self.requested = 0
        self._ahead = Ahead([job.part for job in jobs])
        self._staging = Staging()
        self._open: tuple[Job, int] | None = None
        # The current job, and what had been requested before it; the last tick, in bytes and seconds.
        self._number, self._before = 0, 0
        self._ticked, self._when, self._disk = 0, time.monotonic(), False

    def run(self) -> None:
        """Carries out the jobs."""
        for number, job in enumerate(self.jobs):
            self._number, self._before = number, self.requested
            self.read(job)
        self._finish_file()
        self.tick(self.requested - self._ticked)

    def read(self, job: Job) -> None:
        """Fills the target of one job."""
        part, target = job.part, job.target
        if not part.needed:
            return
        shard = target.view(part.outer, -1, part.inner)
        if target.device.type == "cpu" and target.dtype == part.entry.dtype:
            self._fill(job, shard, 0, part.ranges)
            return
        for first, count, ranges in part.blocks(STAGE_BYTES):
            side_by_side = packed(ranges)
            width = sum(stop - start for start, stop, _ in ranges)
            staged = self._staging.take((count, width, part.inner), part.entry.dtype, target.device)
            self._fill(job, staged, first, side_by_side)
            for at, staged_at, length in consecutive(ranges, side_by_side):
                place = shard[first : first + count].narrow(1, at, length)
                self._staging.move(staged.narrow(1, staged_at, length), place)

    def close(self) -> None:
        """Closes the files that are open."""
        self._ahead.close()
        self._close_file()

    def _close_file(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _finish_file(self) -> None:
        """Closes the file that was read, which must be what it was at first: the reads before may be of another."""
        if self._open is not None:
            job, file = self._open
            if not is_same(job.part.entry, file):
                raise self._told(job, job.part.entry.offset, "the file was written to while it was read")
            self._close_file()

    def _descriptor(self, job: Job) -> int:
        # Files are visited in order, so one is open at a time.
        entry = job.part.entry
        if self._open is None or self._open[0].part.entry.file != entry.file:
            self._finish_file()
            try:
                self._open = (job, open_file(entry))
            except OSError as error:
                raise self._told(job, entry.offset, error) from error
        return self._open[1]

    def _told(self, job: Job, position: int, what: object) -> OSError:
        where = f"at offset {position} of {job.part.entry.file}"
        return OSError(f"rank {self.rank} cannot read '{job.name}' {where}: {what}")

    def _fill(self, job: Job, target: torch.Tensor, first: int, ranges: Sequence[Range]) -> None:
        """Puts `ranges` of the tensor's rows, from row `first` on, into `target [count, width, inner]` on the CPU."""
        part, unit, file = job.part, job.part.unit, self._descriptor(job)
        data, width = target.view(-1).view(torch.uint8).numpy().data, target.shape[1] * unit
        row_bytes = part.length * unit
        position = part.entry.offset + first * row_bytes
        if not part.by_runs(CALL_BYTES):
            step = max(1, (PIECES - 1) // (2 * len(ranges)))
            for row in range(0, target.shape[0], step):
                count = min(step, target.shape[0] - row)
                pieces = rows(part, data[row * width :], width, ranges, count)
                self._fetch(job, file, pieces, position + row * row_bytes, count * row_bytes)
            return
        runs = [(at * unit, (at + stop - start) * unit, start * unit) for start, stop, at in ranges]
        for place in range(0, target.shape[0] * width, width):
            for begin, end, offset in runs:
                self._fetch(job, file, [data[place + begin : place + end]], position + offset, end - begin)
            position += row_bytes

    def _fetch(self, job: Job, file: int, pieces: list[memoryview], position: int, nbytes: int) -> None:
        """Fills the `pieces`, one after the other, with `nbytes` in all, from `position` of the file on."""
        while nbytes:
            # Not all of a large piece at once, or the caller would hear of nothing.
            large = nbytes > TICK_BYTES and len(pieces) == 1
            some = [pieces[0][:TICK_BYTES]] if large else pieces[:PIECES]
            try:
                count = os.preadv(file, some, position)
            except OSError as error:
                raise self._told(job, position, error) from error
            if count == 0:
                raise self._told(job, position, f"the file ends {nbytes} bytes early")
            position += count
            nbytes -= count
            self.requested += count
            if nbytes:
                pieces = after(pieces, count)
            if self.requested - self._ticked >= TICK_BYTES:
                self._tick()

    def _tick(self) -> None:
        count, now = self.requested - self._ticked, time.monotonic()
        # What has been announced then comes as fast as memory: one slow tick tells.
        self._disk = self._disk or count < (now - self._when) * DISK_RATE
        if self._disk:
            wanted = self.jobs[self._number].part.requested(CALL_BYTES)
            self._ahead.reached(self._number, (self.requested - self._before) / wanted)
        self.tick(count)
        self._ticked, self._when = self.requested, time.monotonic()
