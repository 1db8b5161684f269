"""What single reads and copies fill: pieces of memory, in the order of the file."""

from collections.abc import Iterator, Sequence

from ..plans.spec import Range
from .parts import Part


def rows(part: Part, data: memoryview, width: int, ranges: Sequence[Range], count: int) -> Iterator[memoryview]:
    """For `count` whole rows of the file: where each of the `ranges` goes in `data`, and a buffer for what is between.

    A row of `data` has `width` bytes. The buffer is as long as the widest gap: it stays in the processor's cache.
    """
    between = part.length - sum(stop - start for start, stop, _ in ranges)
    unit, spare = part.unit, memoryview(bytearray(between * part.unit))
    gaps: dict[int, memoryview] = {}
    gap = 0
    for row in range(count):
        reached, place = 0, row * width
        for start, stop, at in ranges:
            gap += start - reached
            if gap:
                if gap not in gaps:
                    gaps[gap] = spare[: gap * unit]
                yield gaps[gap]
                gap = 0
            yield data[place + at * unit : place + (at + stop - start) * unit]
            reached = stop
        gap += part.length - reached
    if gap:
        yield spare[: gap * unit]


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
