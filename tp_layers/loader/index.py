"""Where every tensor of a checkpoint lies, from the headers of its safetensors files alone."""

import json
import logging
import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from .layout import first_files, nothing_found

logger = logging.getLogger(__name__)

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


@dataclass(frozen=True)
class Entry:
    """One tensor: its file, dtype, shape, and the offset of its first byte in the file.

    `identity` is the file's own, where the header was read: another under its name, or another content, has other
    offsets.
    """

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    identity: tuple[int, ...] | None = None


def read_index(folder: Path, variant: str | None = None) -> dict[str, Entry]:
    """Every tensor of the checkpoint in `folder`: one safetensors file, or several with their index.

    Raises:
        FileNotFoundError: there are no safetensors weights (of that variant), or the index names a file that is not
            there.
        ValueError: the index or a header is broken, a file is cut short, or the index names a tensor its file lacks.
    """
    for name in first_files(variant):
        file = folder / name
        if file.is_file():
            return _read_several(file) if file.suffix == ".json" else read_header(file)
    raise FileNotFoundError(nothing_found((path.name for path in folder.iterdir()), variant, folder))


def read_weight_map(index: Path) -> dict[str, str]:
    """The name of each tensor's file, all of them in the index's folder or below it.

    Raises:
        ValueError: it is not an index, or names a file elsewhere.
    """
    try:
        weight_map: dict[str, str] = _parse(index.read_bytes())["weight_map"]
        paths = {name: PurePosixPath(name) for name in sorted(set(weight_map.values()))}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ValueError(f"{index} is not a checkpoint index: {error!r}") from error
    for name, path in paths.items():
        # The name alone is checked: in a hub's cache the file itself is a link that leaves the folder.
        if path.is_absolute() or ".." in path.parts or "\\" in name:
            raise ValueError(f"{index} names '{name}', which lies outside its folder")
    return weight_map


def _parse(text: bytes) -> Any:
    """JSON in which no name comes twice: of two values one would win by order."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            counts = Counter(name for name, _ in pairs)
            raise ValueError(f"{[name for name, count in counts.items() if count > 1]} twice")
        return found

    return json.loads(text, object_pairs_hook=unique)


def _read_several(index: Path) -> dict[str, Entry]:
    weight_map = read_weight_map(index)
    headers = {name: read_header(index.parent / name) for name in sorted(set(weight_map.values()))}
    entries = {}
    for key, name in weight_map.items():
        if key not in headers[name]:
            raise ValueError(f"{index} places '{key}' in {name}, which does not hold it")
        entries[key] = headers[name][key]
    unlisted = sorted({key for header in headers.values() for key in header} - set(entries))
    if unlisted:
        logger.warning("%s does not list %s: not read", index, unlisted)
    for name, header in headers.items():
        twice = sorted(key for key in header if weight_map.get(key, name) != name)
        if twice:
            logger.warning("%s places %s elsewhere than in %s, which has them too: not read there", index, twice, name)
    return entries


def identity(descriptor: int) -> tuple[int, ...]:
    """What tells an open file from any other, and from what it was before it was written to."""
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def open_file(entry: Entry) -> int:
    """A descriptor of the file whose header told of `entry`.

    Raises:
        OSError: it cannot be opened, or is another file by now, or another content.
    """
    descriptor = os.open(entry.file, os.O_RDONLY)
    if is_same(entry, descriptor):
        return descriptor
    os.close(descriptor)
    raise OSError(f"{entry.file} is not the file whose header was read, or was written to since")


def is_same(entry: Entry, descriptor: int) -> bool:
    """Whether an open file is the one whose header told of `entry`, and was not written to since."""
    return entry.identity in (None, identity(descriptor))


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file, in the order of their bytes. safetensors' own parser decides what is valid.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: safetensors refuses the file (a broken header, a file cut short), or a dtype is unknown here.
    """
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing from the checkpoint")
    try:
        with safe_open(file, framework="pt"):
            pass
    except SafetensorError as error:
        raise ValueError(f"{file} is not a whole safetensors file: {error}") from error
    with open(file, "rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        text = stream.read(length)
        own = identity(stream.fileno())
    try:
        header = _parse(text)
    except ValueError as error:
        raise ValueError(f"the header of {file} is not read: {error}") from error
    header.pop("__metadata__", None)
    strange = [key for key, info in header.items() if not isinstance(info, dict) or not isinstance(info["dtype"], str)]
    if strange:
        raise ValueError(f"the header of {file} describes {strange} in words that are not safetensors' own")
    unknown = sorted({f"{info['dtype']} ('{key}')" for key, info in header.items() if info["dtype"] not in DTYPES})
    if unknown:
        raise ValueError(f"{file} holds dtypes that cannot be read: {', '.join(unknown)}")
    first = 8 + length
    entries = {
        key: Entry(file, DTYPES[info["dtype"]], tuple(info["shape"]), first + info["data_offsets"][0], own)
        for key, info in header.items()
    }
    return dict(sorted(entries.items(), key=lambda item: item[1].offset))
