"""Tensors that stay in their files, mapped into memory, for `load(..., mmap=True)`.

The pages of a node's ranks are shared, and read when they are used. What a rank needs of a tensor must lie in one run,
in the dtype it is wanted in: whole tensors, and shards of one block cut along dim 0. If a file is cut short while it is
mapped, the process ends.
"""

import os
from collections import Counter
from pathlib import Path
from typing import cast

import torch
from torch import nn

from .index import open_file
from .parts import Part, Parts


def map_parts(model: nn.Module, parts: Parts) -> tuple[dict[str, torch.Tensor], Parts]:
    """The tensors that can be mapped, by name, and the parts of all others, that must be read.

    Raises:
        OSError: a file is not the one whose header was read, or was written to since.
    """
    state = model.state_dict()
    counts = Counter(name for name, _ in parts)
    storages: dict[Path, torch.UntypedStorage] = {}
    mapped: dict[str, torch.Tensor] = {}
    left = []
    for name, part in parts:
        wanted = state[name]
        if counts[name] > 1 or not _is_one_run(part) or part.entry.dtype != wanted.dtype:
            left.append((name, part))
            continue
        if part.entry.file not in storages:
            storages[part.entry.file] = _map(part)
        position = part.entry.offset + part.ranges[0].start * part.unit
        storage, first = storages[part.entry.file], position // wanted.dtype.itemsize
        mapped[name] = torch.empty(0, dtype=wanted.dtype).set_(storage, first, wanted.shape, wanted.stride())
    return mapped, left


def _is_one_run(part: Part) -> bool:
    one = part.outer == 1 and len(part.ranges) == 1 and part.needed > 0
    return one and (part.entry.offset + part.ranges[0].start * part.unit) % part.entry.dtype.itemsize == 0


def _map(part: Part) -> torch.UntypedStorage:
    """All of a file, copied page by page where it is written to."""
    descriptor = open_file(part.entry)
    size = os.fstat(descriptor).st_size
    os.close(descriptor)
    storage = torch.UntypedStorage.from_file(str(part.entry.file), shared=False, nbytes=size)
    return cast(torch.UntypedStorage, storage)
