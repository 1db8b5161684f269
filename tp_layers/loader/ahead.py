"""Tells the file system what will be read next, so that the disk works while bytes are copied.

Of a column shard of a weight the reads leave gaps, which the system's own readahead takes for random access: 8 ranks of
one node would each wait for every read.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from .parts import Part

WINDOW_BYTES = 32 << 20
# Linux cuts one advice to the readahead limit of the disk; more than this at once would be dropped.
STEP_BYTES = 1 << 20
# Ranges with less than this between them are announced as one.
GAP_BYTES = 1 << 20


class Ahead:
    """Keeps the next `WINDOW_BYTES` of what `parts` lie in announced."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._steps = self._all_steps()
        self._next = next(self._steps, None)
        self._open: tuple[Path, int] | None = None
        self._starts, total = [], 0
        for part in parts:
            self._starts.append(total)
            total += self._span(part)

    def reached(self, number: int, share: float) -> None:
        """Announces what follows; `share` of part `number` has been read."""
        position = self._starts[number] + share * self._span(self._parts[number])
        while self._next is not None and self._next[0] < position + WINDOW_BYTES:
            distance, file, offset, count = self._next
            self._next = next(self._steps, None)
            if distance < position:
                continue
            # A courtesy: a file that is gone is reported by the read itself, and some file systems take no advice.
            with suppress(OSError, AttributeError):
                os.posix_fadvise(self._descriptor(file), offset, count, os.POSIX_FADV_WILLNEED)

    def close(self) -> None:
        """Closes the file that is open."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    @staticmethod
    def _span(part: Part) -> int:
        return sum(count for _, count in part.extents(GAP_BYTES))

    def _all_steps(self) -> Iterator[tuple[int, Path, int, int]]:
        distance = 0
        for part in self._parts:
            for offset, count in part.extents(GAP_BYTES):
                for first in range(0, count, STEP_BYTES):
                    step = min(STEP_BYTES, count - first)
                    yield distance, part.entry.file, offset + first, step
                    distance += step

    def _descriptor(self, file: Path) -> int:
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, os.open(file, os.O_RDONLY))
        return self._open[1]
