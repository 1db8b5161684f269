"""safetensors files, written one tensor after the other, and what makes files last."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from ..plans.spec import ShardSpec
from .index import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its name, its shape and dtype there, and how its parameter is sharded."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: ShardSpec | None

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class TensorFile:
    """A new safetensors file of `items`, whose tensors are then appended in that order."""

    def __init__(self, path: Path, items: Sequence[Stored], metadata: Mapping[str, str]) -> None:
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        offset = 0
        for item in items:
            offsets = [offset, offset + item.nbytes]
            header[item.name] = {"dtype": NAMES[item.dtype], "shape": list(item.shape), "data_offsets": offsets}
            offset += item.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._stream: IO[bytes] = open(path, "wb")  # noqa: SIM115
        self._stream.write(len(text).to_bytes(8, "little") + text)

    def append(self, tensor: torch.Tensor) -> None:
        """Writes the next tensor, from any device."""
        self._stream.write(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def close(self) -> None:
        """Returns once the file is on the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()

    def abandon(self) -> None:
        """Closes a file that will not be used."""
        # On a full disk closing fails too, as it writes what is buffered.
        with suppress(OSError):
            self._stream.close()


def by_width(items: Sequence[Stored]) -> list[Stored]:
    """Wider dtypes first, so that each tensor starts at a multiple of its element's size."""
    return sorted(items, key=lambda item: -item.dtype.itemsize)


def write_bytes(path: Path, data: bytes) -> None:
    """A new file of `data`; returns once it is on the disk."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def sync_folder(folder: Path) -> None:
    """Returns once the names in `folder` are on the disk: of renamed files, only then the new name is sure to last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
