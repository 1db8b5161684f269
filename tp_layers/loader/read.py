"""From a file straight into a shard: each rank reads the ranges its spec gives, and no full tensor exists.

    shard                                    how
    whole tensor, or cut along dim 0         its rows, read to their place
    cut along a later dim, wide gaps         each run to its place, by a read of its own
    cut along a later dim, narrow gaps       whole rows, once, through the bounce buffer

That is for a shard in CPU memory and in the file's dtype; others are put together in pieces, in staging buffers, in the
same way. Reads, not mappings: a file cut short under a mapping ends the process, under a read it is an error.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from ..plans.spec import Range
from .ahead import Ahead
from .index import Entry, identity
from .parts import Part
from .staging import STAGE_BYTES, Staging

BOUNCE_BYTES = 8 << 20
# Reading this much between two runs along with them takes as long as a read of its own (1.2 microseconds).
CALL_BYTES = 12 << 10
# After each of these the caller hears of it, and the file system of what comes next.
TICK_BYTES = 4 << 20


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
        self._bounce: torch.Tensor | None = None
        self._open: tuple[Path, int] | None = None
        # The current job, and what had been requested before it and at the last tick.
        self._number, self._before, self._ticked = 0, 0, 0

    def run(self) -> None:
        """Carries out the jobs."""
        for number, job in enumerate(self.jobs):
            self._number, self._before = number, self.requested
            self._ahead.reached(number, 0.0)
            self.read(job)
        self.tick(self.requested - self._ticked)

    def read(self, job: Job) -> None:
        """Fills the target of one job."""
        part, target = job.part, job.target
        if not part.needed:
            return
        rows = target.view(part.outer, -1, part.inner)
        source = _Source(self, job.name, part)
        if target.device.type == "cpu" and target.dtype == part.entry.dtype:
            source.fill(rows, 0, part.ranges)
            return
        for first, count, ranges in part.blocks(STAGE_BYTES):
            packed = _packed(ranges)
            width = sum(stop - start for start, stop, _ in packed)
            staged = self._staging.take((count, width, part.inner), part.entry.dtype, target.device)
            source.fill(staged, first, packed)
            for piece in _consecutive(ranges, packed):
                at, staged_at, length = piece
                self._staging.move(
                    staged.narrow(1, staged_at, length), rows[first : first + count].narrow(1, at, length)
                )

    def close(self) -> None:
        """Closes the files that are open."""
        self._ahead.close()
        self._close_file()

    def fetch(self, view: memoryview, position: int, source: "_Source") -> None:
        """Reads `len(view)` bytes, from `position` of the source's file on, into `view`."""
        while view:
            try:
                count = os.preadv(self._descriptor(source.part.entry), [view[:TICK_BYTES]], position)
            except OSError as error:
                raise OSError(f"{self._where(source, position)}: {error}") from error
            if count == 0:
                raise OSError(f"{self._where(source, position)}: the file ends {len(view)} bytes early")
            view, position = view[count:], position + count
            self.requested += count
            if self.requested - self._ticked >= TICK_BYTES:
                self._tick()

    @property
    def bounce(self) -> torch.Tensor:
        """The buffer `[BOUNCE_BYTES]` that whole rows are read into."""
        if self._bounce is None:
            self._bounce = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, device="cpu")
        return self._bounce

    def _tick(self) -> None:
        count, self._ticked = self.requested - self._ticked, self.requested
        wanted = self.jobs[self._number].part.requested(CALL_BYTES)
        self._ahead.reached(self._number, (self.requested - self._before) / wanted)
        self.tick(count)

    def _descriptor(self, entry: Entry) -> int:
        # Files are visited in order, so one is open at a time.
        if self._open is None or self._open[0] != entry.file:
            self._close_file()
            self._open = (entry.file, os.open(entry.file, os.O_RDONLY))
            if entry.identity not in (None, identity(self._open[1])):
                raise OSError("another file has taken its place since its header was read")
        return self._open[1]

    def _close_file(self) -> None:
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def _where(self, source: "_Source", position: int) -> str:
        return f"rank {self.rank} cannot read '{source.name}' at offset {position} of {source.part.entry.file}"


class _Source:
    """The bytes of one stored tensor."""

    def __init__(self, reader: Reader, name: str, part: Part) -> None:
        self.reader, self.name, self.part = reader, name, part

    def fill(self, rows: torch.Tensor, first: int, ranges: Sequence[Range]) -> None:
        """Puts the `ranges` of the tensor's rows, from row `first` on, into `rows [count, width, inner]`."""
        way = self._by_runs if self.part.by_runs(CALL_BYTES) else self._by_rows
        way(rows, first, ranges)

    def _by_runs(self, rows: torch.Tensor, first: int, ranges: Sequence[Range]) -> None:
        part, fetch = self.part, self.reader.fetch
        unit, row_bytes, local_bytes = part.unit, part.length * part.unit, rows.shape[1] * part.unit
        data = rows.view(-1).view(torch.uint8).numpy().data
        for row in range(rows.shape[0]):
            position, local = part.entry.offset + (first + row) * row_bytes, row * local_bytes
            for start, stop, at in ranges:
                fetch(data[local + at * unit : local + (at + stop - start) * unit], position + start * unit, self)

    def _by_rows(self, rows: torch.Tensor, first: int, ranges: Sequence[Range]) -> None:
        part, bounce = self.part, self.reader.bounce
        row_bytes = part.length * part.unit
        if row_bytes > bounce.numel():
            bounce = torch.empty(row_bytes, dtype=torch.uint8, device="cpu")
        step = bounce.numel() // row_bytes
        for done in range(0, rows.shape[0], step):
            count = min(step, rows.shape[0] - done)
            raw = bounce[: count * row_bytes]
            self.reader.fetch(raw.numpy().data, part.entry.offset + (first + done) * row_bytes, self)
            full = raw.view(part.entry.dtype).view(count, part.length, part.inner)
            for start, stop, at in ranges:
                rows[done : done + count, at : at + stop - start].copy_(full[:, start:stop])


def _packed(ranges: Sequence[Range]) -> list[Range]:
    """The same ranges, put side by side."""
    packed, at = [], 0
    for start, stop, _ in ranges:
        packed.append(Range(start, stop, at))
        at += stop - start
    return packed


def _consecutive(ranges: Sequence[Range], packed: Sequence[Range]) -> list[tuple[int, int, int]]:
    """What can be copied at once, as (place in the shard, place in the packed buffer, length)."""
    pieces: list[tuple[int, int, int]] = []
    for (start, stop, at), (_, _, packed_at) in zip(ranges, packed, strict=True):
        if pieces and pieces[-1][0] + pieces[-1][2] == at:
            pieces[-1] = (pieces[-1][0], pieces[-1][1], pieces[-1][2] + stop - start)
        else:
            pieces.append((at, packed_at, stop - start))
    return pieces
