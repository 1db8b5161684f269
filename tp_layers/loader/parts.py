"""What a rank needs of a stored tensor, as bytes of its file.

A tensor that is cut along one dim is a matrix of `outer` rows, of each of which the rank needs the same `ranges`:

    file     [ a a a a | b b b b | a a a a | b b b b ... ]     outer rows, of `length` units each
    needed     . x x .   . x x .   . x x .   . x x .           ranges (1:3, 5:7)

Cut along dim 0, or whole, there is one row. A unit is what lies behind one index of the cut dim.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ..plans.spec import Range, ShardSpec
from .index import Entry
from .snapshot import Source

# No more than a staging buffer holds, so that rows which are read with their gaps are staged whole.
LONG_ROW_BYTES = 1 << 20


@dataclass(frozen=True)
class Part:
    """The `ranges` a rank needs of each of the `outer` rows of `entry`, in units of `unit` bytes."""

    entry: Entry
    outer: int
    length: int
    inner: int
    ranges: tuple[Range, ...]

    @classmethod
    def of(cls, entry: Entry, dim: int, ranges: list[Range], extent: int) -> "Part":
        """The `ranges` along `dim` of a stored tensor; each says where in the shard, `extent` long there, it goes."""
        dim %= max(len(entry.shape), 1)
        merged = _merged(ranges)
        outer, inner = math.prod(entry.shape[:dim]), math.prod(entry.shape[dim + 1 :])
        length = entry.shape[dim] if entry.shape else 1
        if outer == 1 or (merged == [Range(0, length, 0)] and extent == length):
            # Its rows lie side by side in the file and in the shard: one row of single elements.
            outer, length, merged = 1, outer * length * inner, [_times(it, outer * inner) for it in merged]
            inner = 1
        return cls(entry, outer, length, inner, tuple(merged))

    @property
    def unit(self) -> int:
        """Bytes in the file behind one index."""
        return self.inner * self.entry.dtype.itemsize

    @property
    def width(self) -> int:
        """Units needed of each row."""
        return sum(stop - start for start, stop, _ in self.ranges)

    @property
    def needed(self) -> int:
        """Bytes of the file that are in the shard."""
        return self.outer * self.width * self.unit

    def by_runs(self, call_bytes: int) -> bool:
        """Whether each range is read by itself: what lies between them is worth more than `call_bytes` a read.

        So it is where a row is long: the reads are few.
        """
        between, needed = (self.length - self.width) * self.unit, self.width * self.unit
        return self.outer == 1 or needed > LONG_ROW_BYTES or between >= len(self.ranges) * call_bytes

    def requested(self, call_bytes: int) -> int:
        """Bytes that are asked of the file: those needed, or the whole rows."""
        return self.needed if self.by_runs(call_bytes) else self.outer * self.length * self.unit

    def extents(self, call_bytes: int) -> Iterator[tuple[int, int]]:
        """What the file system is told of beforehand, as (position in the file, bytes)."""
        row_bytes = self.length * self.unit
        if self.outer > 1 and not self.by_runs(call_bytes):
            yield self.entry.offset, self.outer * row_bytes
            return
        for row in range(self.outer):
            for start, stop, _ in self.ranges:
                yield self.entry.offset + row * row_bytes + start * self.unit, (stop - start) * self.unit

    def blocks(self, limit: int) -> Iterator[tuple[int, int, tuple[Range, ...]]]:
        """The part in pieces of at most `limit` bytes: first row, number of rows, and ranges.

        A piece is never less than a unit.
        """
        row_bytes = self.width * self.unit
        if row_bytes <= limit:
            step = limit // max(row_bytes, 1)
            for first in range(0, self.outer, step):
                yield first, min(step, self.outer - first), self.ranges
            return
        step = max(1, limit // self.unit)
        for row in range(self.outer):
            for start, stop, at in self.ranges:
                for first in range(start, stop, step):
                    yield row, 1, (Range(first, min(first + step, stop), at + first - start),)


# Of a whole checkpoint, each with the name of its tensor.
Parts = list[tuple[str, Part]]


def parts_of(source: Source, spec: ShardSpec | None, rank: int, size: int) -> list[Part]:
    """What the shard of `rank` under `spec` (None: the whole tensor) is made of: a part of each file that has some.

    Raises:
        ValueError: a snapshot holds shards along another dim.
    """
    dims = max(len(source.shape), 1)
    own = None if spec is None else replace(spec, dim=spec.dim % dims)
    if isinstance(source, Entry):
        return [Part.of(source, own.dim, own.ranges(rank, size), own.extent(rank, size)) if own else whole(source)]
    stored = replace(source.spec, dim=source.spec.dim % dims)
    if own is None:
        own, rank, size = ShardSpec(stored.dim, (stored.length,)), 0, 1
    if own.dim != stored.dim:
        raise ValueError(
            f"it was saved in shards along dim {stored.dim}, the plan cuts dim {own.dim}: "
            f"load it with the plan it was saved with, or save it whole"
        )
    shards = enumerate(source.shards)
    overlaps = [(shard, own.overlap(rank, size, stored, at, len(source.shards))) for at, shard in shards]
    return [Part.of(shard, stored.dim, ranges, own.extent(rank, size)) for shard, ranges in overlaps if ranges]


def whole(entry: Entry) -> Part:
    """All of a stored tensor."""
    length = entry.shape[0] if entry.shape else 1
    return Part.of(entry, 0, [Range(0, length, 0)], length)


def _times(it: Range, factor: int) -> Range:
    return Range(it.start * factor, it.stop * factor, it.at * factor)


def _merged(ranges: list[Range]) -> list[Range]:
    """Ranges that lie side by side, in the file and in the shard, as one."""
    merged: list[Range] = []
    for it in ranges:
        last = merged[-1] if merged else None
        if last is not None and last.stop == it.start and last.at + last.stop - last.start == it.at:
            merged[-1] = Range(last.start, it.stop, last.at)
        else:
            merged.append(it)
    return merged
