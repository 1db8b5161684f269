"""A sharded snapshot: a file of shards from each rank, and a manifest that names the files in rank order.

    tp_layers.json                                    {"version", "size", "files"}
    tp_layers-1f2e3d4c-00001-of-00002.safetensors     rank 0: its shards, and what is whole on every rank
    tp_layers-1f2e3d4c-00002-of-00002.safetensors     rank 1: its shards
    config.json                                       as in an ordinary checkpoint

Each file says in its safetensors metadata, as JSON under "tp_layers", which rank of how many wrote it, and how every
sharded tensor is cut: {"version", "rank", "size", "specs": {name: {"dim", "blocks", "granules"}}}. Only a cut in whole
granules has the last of them, and makes the version of its file 2.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from ..plans.spec import ShardSpec
from .index import Entry, read_header, read_index

MANIFEST = "tp_layers.json"
KEY = "tp_layers"
# Of the manifest; and of the file of a rank, which is the second where some tensor is cut in granules.
VERSION = 1
FILE_VERSIONS = (1, 2)


@dataclass(frozen=True)
class Sharded:
    """One tensor that every rank holds a part of: the cut, and the shards in rank order."""

    spec: ShardSpec
    shards: tuple[Entry, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every shard."""
        return self.shards[0].dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self.spec.full_shape(self.shards[0].shape)

    @property
    def file(self) -> Path:
        """The file of the first shard."""
        return self.shards[0].file

    @property
    def offset(self) -> int:
        """The offset of the first shard's first byte in its file."""
        return self.shards[0].offset


# Where a tensor of a checkpoint lies.
Source = Entry | Sharded


def is_snapshot(folder: Path) -> bool:
    """Whether `folder` holds a sharded snapshot."""
    return (folder / MANIFEST).is_file()


def read_sources(folder: Path, variant: str | None = None) -> dict[str, Source]:
    """Every tensor of the checkpoint in `folder`, a sharded snapshot or an ordinary one.

    Raises:
        FileNotFoundError, ValueError: as `read_snapshot` and `read_index`; or a variant is asked of a snapshot.
    """
    if not is_snapshot(folder):
        return dict(read_index(folder, variant))
    if variant is not None:
        raise ValueError(f"{folder} holds a sharded snapshot, which has no variants, so none called {variant!r}")
    return read_snapshot(folder)


def contents(sources: Mapping[str, Source]) -> list[str]:
    """What the ranks' views of a checkpoint have in common, wherever each has it: of each tensor its place and kind."""
    found = sources.items()
    return sorted(f"{name}: {it.dtype} {it.shape} at {it.offset} of {it.file.name}" for name, it in found)


def read_snapshot(folder: Path) -> dict[str, Source]:
    """Every tensor of the snapshot in `folder`, in the order of rank 0's file, from headers alone.

    Raises:
        FileNotFoundError: there is no manifest, or a file that it names is missing.
        ValueError: manifest, file or tensor, which are named, are broken or do not fit each other, or were written by a
            later version.
    """
    files = _files(folder)
    headers = [read_header(file) for file in files]
    specs = [_specs(file, rank, len(files)) for rank, file in enumerate(files)]
    for file, header, own in zip(files, headers, specs, strict=True):
        for name in {**specs[0], **own}:
            if own.get(name) != specs[0].get(name):
                raise ValueError(f"{file} cuts '{name}' by {own.get(name)}, {files[0].name} by {specs[0].get(name)}")
            if name not in header:
                raise ValueError(f"{file} lacks its shard of '{name}'")
        for name in header:
            if name not in own and header is not headers[0]:
                raise ValueError(f"{file} holds '{name}', which is no shard and belongs in {files[0].name}")
    found: dict[str, Source] = {}
    for name, entry in headers[0].items():
        spec = specs[0].get(name)
        found[name] = entry if spec is None else _fitting(name, spec, tuple(header[name] for header in headers))
    return found


def _files(folder: Path) -> list[Path]:
    manifest = folder / MANIFEST
    if not manifest.is_file():
        raise FileNotFoundError(f"{folder} holds no sharded snapshot: it has no {MANIFEST}")
    try:
        told = json.loads(manifest.read_bytes())
        version, size, names = told["version"], told["size"], told["files"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{manifest} is not the manifest of a sharded snapshot: {error!r}") from error
    _check_version(manifest, version, VERSION)
    if type(size) is not int or not isinstance(names, list) or len(names) != size or not names:
        raise ValueError(f"{manifest} has size {size!r}, which is not the number of its files {names!r}")
    for name in names:
        # The name alone is checked: in a hub's cache the file itself is a link that leaves the folder.
        if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\\" in name or "\0" in name:
            raise ValueError(f"{manifest} names {name!r}, which is no file of its folder")
        if names.count(name) > 1:
            raise ValueError(f"{manifest} names '{name}' for two ranks")
    return [folder / name for name in names]


def _check_version(file: Path, version: Any, newest: int) -> None:
    if type(version) is not int or version < 1:
        raise ValueError(f"{file} has no version that is known here, but {version!r}")
    if version > newest:
        raise ValueError(f"{file} is of version {version}, written by a later tp_layers: this one reads {newest}")


def _specs(file: Path, rank: int, size: int) -> dict[str, ShardSpec]:
    """How the file of `rank` says the sharded tensors are cut."""
    with safe_open(file, framework="pt") as opened:
        text = (opened.metadata() or {}).get(KEY)
    try:
        told = json.loads(text or "")
        version, place = told["version"], (told["rank"], told["size"])
        cuts = {name: (cut["dim"], tuple(cut["blocks"]), cut.get("granules")) for name, cut in told["specs"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{file} does not say in its metadata whose shards it holds: {error!r}") from error
    _check_version(file, version, FILE_VERSIONS[-1])
    if place != (rank, size):
        raise ValueError(f"{file} is of rank {place[0]} of {place[1]}, {MANIFEST} names it for rank {rank} of {size}")
    specs = {}
    for name, (dim, blocks, granules) in cuts.items():
        if type(dim) is not int or not _are_counts(blocks):
            raise ValueError(f"{file} cuts '{name}' along dim {dim!r} by blocks {blocks!r}, which is no cut")
        try:
            if granules is not None and not (isinstance(granules, list) and _are_counts(granules)):
                raise ValueError("they are no list of numbers")
            specs[name] = ShardSpec.of(dim, sum(blocks), blocks, granules)
        except ValueError as error:
            raise ValueError(f"{file} cuts '{name}' in granules {granules!r}, which is no cut: {error}") from error
    return specs


def _are_counts(values: Sequence[Any]) -> bool:
    return len(values) > 0 and all(type(value) is int and value > 0 for value in values)


def _fitting(name: str, spec: ShardSpec, shards: tuple[Entry, ...]) -> Sharded:
    first, size = shards[0], len(shards)
    for rank, shard in enumerate(shards):
        try:
            local = spec.local_shape(spec.full_shape(first.shape), rank, size)
        except (ValueError, IndexError) as error:
            raise ValueError(f"{shard.file} cannot hold a shard of '{name}' by {spec}: {error}") from error
        if shard.dtype != first.dtype or (spec.is_even(size) and shard.shape != first.shape):
            raise ValueError(
                f"{shard.file} holds '{name}' as {shard.dtype} {shard.shape}, "
                f"{first.file.name} as {first.dtype} {first.shape}"
            )
        if local != shard.shape:
            raise ValueError(
                f"{shard.file} holds '{name}' as {shard.shape}, rank {rank}'s of {size} by {spec} is {local}"
            )
    return Sharded(spec, shards)
