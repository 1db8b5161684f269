"""Tied parameters of which a checkpoint has several: one entry is read where they hold the same, none is chosen else.

They are one tensor in the model, so that of two that differ one would win by order. To know, each rank reads both of
them (up to the first difference) beside the bytes that a report counts.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from .index import Entry, open_file
from .snapshot import Source

# What is held of each of two tensors while they are compared.
PIECE_BYTES = 8 << 20
# Tensors that differ mostly do so everywhere: these are looked at first, evenly spread.
SAMPLES, SAMPLE_BYTES = 4, 64 << 10


def keep_one(model: nn.Module, entries: dict[str, Source]) -> dict[str, Source]:
    """The `entries` without those of a parameter or buffer of `model` of which there is an equal one before.

    Raises:
        ValueError: two entries of one tensor differ: by a bit, in dtype or shape, or in how a snapshot cuts them.
        OSError: a file cannot be read, ends early or has been replaced.
    """
    first: dict[int, str] = {}
    kept = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name not in entries:
            continue
        one = first.setdefault(id(tensor), name)
        if one == name:
            kept[name] = entries[name]
        elif not same_bytes(entries[one], entries[name]):
            what = type(model).__name__
            raise ValueError(f"'{one}' and '{name}' are one tensor in {what} and differ in the checkpoint")
    return kept


def same_bytes(one: Source, other: Source) -> bool:
    """Whether two stored tensors have the same dtype, shape and bits, and in a snapshot the same cut.

    Both are read, whole if they are equal, by the rank that asks, in pieces of 8 MiB: no report counts these bytes.

    Raises:
        OSError: a file cannot be read, ends early or has been replaced.
    """
    if isinstance(one, Entry) and isinstance(other, Entry):
        return _same(one, other)
    if isinstance(one, Entry) or isinstance(other, Entry) or one.spec != other.spec:
        return False
    pairs = list(zip(one.shards, other.shards, strict=True))
    return all(_same(first, second) for first, second in pairs)


def _same(one: Entry, other: Entry) -> bool:
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    nbytes = torch.Size(one.shape).numel() * one.dtype.itemsize
    with _opened(one) as first, _opened(other) as second:
        for at, count in _pieces(nbytes):
            if _read(one, first, at, count) != _read(other, second, at, count):
                return False
    return True


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    """Offset and length of what is compared, one after the other: the samples, then all."""
    if nbytes > PIECE_BYTES:
        last = nbytes - SAMPLE_BYTES
        yield from ((last * number // (SAMPLES - 1), SAMPLE_BYTES) for number in range(SAMPLES))
    yield from ((at, min(PIECE_BYTES, nbytes - at)) for at in range(0, nbytes, PIECE_BYTES))


@contextmanager
def _opened(entry: Entry) -> Iterator[int]:
    file = open_file(entry)
    try:
        yield file
    finally:
        os.close(file)


def _read(entry: Entry, file: int, at: int, count: int) -> bytes:
    found = b""
    while len(found) < count:
        piece = os.pread(file, count - len(found), entry.offset + at + len(found))
        if not piece:
            raise OSError(f"{entry.file} ends early, at offset {entry.offset + at + len(found)}")
        found += piece
    return found
