"""A file of one tensor, the shard of it that the reader gives, and the ways through the reader."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tp_layers.loader import parts, read, staging
from tp_layers.loader.index import DTYPES, Entry, read_header
from tp_layers.plans.spec import ShardSpec

SIZES = (1, 2, 4)
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Shape and spec of a tensor; every block divides by 4, no two dims of a shape are equal.
SHAPES = {
    "rows": ((8, 6), ShardSpec(0, (8,))),
    "columns": ((6, 8), ShardSpec(1, (8,))),
    "columns, counted from the end": ((6, 8), ShardSpec(-1, (8,))),
    "a bias": ((12,), ShardSpec(0, (12,))),
    "the middle dim of three": ((3, 8, 5), ShardSpec(1, (8,))),
    "the last dim of three": ((3, 5, 8), ShardSpec(2, (8,))),
    "the first dim of three": ((4, 3, 5), ShardSpec(0, (4,))),
    "rows of unequal blocks": ((24, 5), ShardSpec(0, (4, 12, 8))),
    "columns of unequal blocks": ((5, 24), ShardSpec(1, (4, 12, 8))),
    "a bias of unequal blocks": ((16,), ShardSpec(0, (12, 4))),
    "the middle dim of three, in unequal blocks": ((3, 16, 2), ShardSpec(1, (4, 12))),
    "one row": ((1, 8), ShardSpec(1, (8,))),
    "columns of no rows": ((0, 8), ShardSpec(1, (8,))),
    "rows without columns": ((8, 0), ShardSpec(0, (8,))),
    "a whole weight": ((5, 7), None),
    "a whole number": ((), None),
    "a whole tensor without elements": ((3, 0, 2), None),
}

# PIECES, STAGE_BYTES and CALL_BYTES that force each way through the reader on tensors this small.
WAYS = {
    "as shipped": (read.PIECES, staging.STAGE_BYTES, read.CALL_BYTES),
    "whole rows, one at a time": (3, 16, 1 << 20),
    "whole rows, some at a time": (5, 160, 1 << 20),
    "every run by itself": (read.PIECES, staging.STAGE_BYTES, 0),
    "every run by itself, in pieces": (read.PIECES, 16, 0),
}
ways = pytest.mark.parametrize("way", WAYS)


def send(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Sends every read one way."""
    monkeypatch.setattr(read, "PIECES", WAYS[way][0])
    monkeypatch.setattr(read, "STAGE_BYTES", WAYS[way][1])
    monkeypatch.setattr(parts, "LONG_ROW_BYTES", min(parts.LONG_ROW_BYTES, WAYS[way][1]))
    monkeypatch.setattr(read, "CALL_BYTES", WAYS[way][2])


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Elements of `dtype` that differ and that other dtypes round."""
    count = torch.Size(shape).numel()
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        return made.to(dtype).view(shape)
    return (torch.arange(count) % (2 if dtype is torch.bool else 101)).to(dtype).view(shape)


def write(folder: Path, tensor: torch.Tensor, before: int = 0) -> Entry:
    """The entry of `tensor`, the only other bytes of its file being `before` and three after it.

    It does not say which file it is of, so that a test may spoil the file.
    """
    sizes = {"before": before, "x": tensor.numel() * tensor.element_size(), "after": 3}
    header, offset = {}, 0
    for name, size in sizes.items():
        mine = name == "x"
        header[name] = {
            "dtype": NAMES[tensor.dtype] if mine else "U8",
            "shape": list(tensor.shape) if mine else [size],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = folder / "x.safetensors"
    data = bytes([0xAA] * before) + bits(tensor).numpy().tobytes() + bytes([0xAA] * 3)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return replace(read_header(file)["x"], identity=None)


def shard(entry: Entry, spec: ShardSpec | None, rank: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """What a rank reads, and the bytes it asked for. The tensor is filled with other bits before."""
    shape = entry.shape if spec is None else spec.local_shape(entry.shape, rank, size)
    target = torch.empty(shape, dtype=dtype)
    bits(target).fill_(0x55)
    (part,) = parts.parts_of(entry, spec, rank, size)
    return target, read.read_shards([read.Job("x", part, target)], rank)
