"""What single reads and copies fill: pieces of memory, in the order of the file."""

from collections.abc import Sequence

from ..plans.spec import Range
from .parts import Part


def rows(part: Part, data: memoryview, width: int, ranges: Sequence[Range], count: int) -> list[memoryview]:
    """For `count` whole rows of the file: where each of the `ranges` goes in `data`, and a buffer for what is between.

    A row of `data` has `width` bytes. The buffer is as long as all gaps of a row: it stays in the processor's cache.
    """
    unit = part.unit
    spare = memoryview(bytearray((part.length - sum(stop - start for start, stop, _ in ranges)) * unit))
    starts = [start for start, _, _ in ranges]
    last = part.length - ranges[-1].stop
    # Behind a row's last range comes the rest of the row, and what lies before the first range of the next.
    gaps = [after - stop for after, (_, stop, _) in zip([*starts[1:], part.length + starts[0]], ranges, strict=True)]
    runs = [
        (at * unit, (at + stop - start) * unit, spare[: gap * unit])
        for (start, stop, at), gap in zip(ranges, gaps, strict=True)
    ]
    pieces = [spare[: starts[0] * unit]]
    for place in range(0, count * width, width):
        for begin, end, gap in runs:
            pieces += (data[place + begin : place + end], gap)
    pieces[-1] = spare[: last * unit]
    return [piece for piece in pieces if len(piece)]


def after(pieces: Sequence[memoryview], count: int) -> list[memoryview]:
    """What is left of the pieces once their first `count` bytes are filled."""
    for number, piece in enumerate(pieces):
        if count < len(piece):
            return [piece[count:], *pieces[number + 1 :]]
        count -= len(piece)
    return []


def packed(ranges: Sequence[Range]) -> list[Range]:
    """The same ranges, put side by side."""
    found, at = [], 0
    for start, stop, _ in ranges:
        found.append(Range(start, stop, at))
        at += stop - start
    return found


def consecutive(ranges: Sequence[Range], side_by_side: Sequence[Range]) -> list[tuple[int, int, int]]:
    """What can be copied at once, as (place in the shard, place among the packed ones, length)."""
    found: list[tuple[int, int, int]] = []
    for (start, stop, at), (_, _, packed_at) in zip(ranges, side_by_side, strict=True):
        if found and found[-1][0] + found[-1][2] == at:
            found[-1] = (*found[-1][:2], found[-1][2] + stop - start)
        else:
            found.append((at, packed_at, stop - start))
    return found
