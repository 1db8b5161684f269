"""From a file straight into a shard: each rank reads the ranges its spec gives, and no full tensor exists.

    destination                              how
    whole tensor, or cut along dim 0         its rows, read to their place
    cut along a later dim, long runs         each run by itself
    cut along a later dim, short runs        whole rows, once, through the bounce buffer

Where the destination is not CPU memory of the file's dtype, every read goes through the bounce buffer, and the copy out
of it casts. Reads, not mappings: a file cut short under a mapping ends the process, under a read it is an error.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ..plans.spec import Range, ShardSpec
from .index import Entry

BOUNCE_BYTES = 8 << 20
# Below this, a read of its own costs more than reading the bytes between the runs along with them.
LONG_RUN_BYTES = 256 << 10


class Reader:
    """Reads shards of one checkpoint for one rank; `requested` counts the bytes it asked the files for."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.requested = 0
        self._bounce = torch.empty(BOUNCE_BYTES, dtype=torch.uint8, device="cpu")
        self._open: tuple[Path, int] | None = None

    def close(self) -> None:
        """Closes the file that is open."""
        if self._open is not None:
            os.close(self._open[1])
            self._open = None

    def read(self, name: str, entry: Entry, spec: ShardSpec | None, target: torch.Tensor) -> None:
        """Fills the contiguous `target` with this rank's shard of `entry` (all of it where `spec` is None).

        Raises:
            OSError: the file ends early or cannot be read; with the file, the tensor and the offset.
        """
        dim = 0 if spec is None else spec.dim % len(entry.shape)
        length = entry.shape[dim] if entry.shape else 1
        ranges = [Range(0, length, 0)] if spec is None else spec.ranges(self.rank, self.size)
        outer, inner = math.prod(entry.shape[:dim]), math.prod(entry.shape[dim + 1 :])
        unit = inner * entry.dtype.itemsize
        rows = target.view(outer, sum(stop - start for start, stop, _ in ranges), inner)
        if not target.numel():
            return
        source = _Source(self, name, entry)
        if outer > 1 and max(stop - start for start, stop, _ in ranges) * unit < LONG_RUN_BYTES:
            self._read_rows(source, rows, ranges, length)
            return
        for row in range(outer):
            for start, stop, at in ranges:
                source.fill(rows[row, at : at + stop - start].view(-1), (row * length + start) * unit)

    def _read_rows(self, source: "_Source", rows: torch.Tensor, ranges: list[Range], length: int) -> None:
        """Whole rows `[count, length, inner]` into the bounce buffer, and the ranges' columns out of it."""
        outer, _, inner = rows.shape
        row_bytes = length * inner * source.entry.dtype.itemsize
        step = max(1, BOUNCE_BYTES // row_bytes)
        bounce = self._bounce if row_bytes <= BOUNCE_BYTES else torch.empty(row_bytes, dtype=torch.uint8, device="cpu")
        for first in range(0, outer, step):
            count = min(step, outer - first)
            raw = bounce[: count * row_bytes]
            source.fetch(raw, first * row_bytes)
            full = raw.view(source.entry.dtype).view(count, length, inner)
            for start, stop, at in ranges:
                rows[first : first + count, at : at + stop - start].copy_(full[:, start:stop])

    def descriptor(self, file: Path) -> int:
        """An open descriptor of `file`; files are visited in order, so one is open at a time."""
        if self._open is None or self._open[0] != file:
            self.close()
            self._open = (file, os.open(file, os.O_RDONLY))
        return self._open[1]

    @property
    def bounce(self) -> torch.Tensor:
        """The buffer `[BOUNCE_BYTES]` that casts and copies to other devices go through."""
        return self._bounce


class _Source:
    """The bytes of one tensor in its file."""

    def __init__(self, reader: Reader, name: str, entry: Entry) -> None:
        self.reader, self.name, self.entry = reader, name, entry

    def fill(self, target: torch.Tensor, offset: int) -> None:
        """A contiguous 1-D `target` from the run of elements that starts `offset` bytes into the tensor."""
        dtype = self.entry.dtype
        if target.dtype == dtype and target.device.type == "cpu":
            self.fetch(target.view(torch.uint8), offset)
            return
        step = BOUNCE_BYTES // dtype.itemsize
        for first in range(0, target.numel(), step):
            piece = target[first : first + step]
            raw = self.reader.bounce[: piece.numel() * dtype.itemsize]
            self.fetch(raw, offset + first * dtype.itemsize)
            piece.copy_(raw.view(dtype))

    def fetch(self, raw: torch.Tensor, offset: int) -> None:
        """Reads `raw.numel()` bytes, from `offset` of the tensor on, into the CPU tensor `raw`."""
        view, position = raw.numpy().data, self.entry.offset + offset
        self.reader.requested += len(view)
        while view:
            try:
                count = os.preadv(self.reader.descriptor(self.entry.file), [view], position)
            except OSError as error:
                raise OSError(f"{self.where(position)}: {error}") from error
            if count == 0:
                raise OSError(f"{self.where(position)}: the file ends {len(view)} bytes early")
            view, position = view[count:], position + count

    def where(self, position: int) -> str:
        return f"cannot read '{self.name}' at offset {position} of {self.entry.file}"


@contextmanager
def reader(rank: int, size: int) -> Iterator[Reader]:
    """A `Reader` whose file is closed at the end."""
    made = Reader(rank, size)
    try:
        yield made
    finally:
        made.close()
