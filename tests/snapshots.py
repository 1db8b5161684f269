"""Sharded snapshots: written by ranks, and read back whole or cut anew."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import tp_layers
from checkpoints import CLASSES
from killed import sharded_toy
from tp_layers.group import Group
from tp_layers.loader.index import Entry
from tp_layers.loader.snapshot import Sharded, read_snapshot
from tp_layers.plans.spec import ShardSpec


def save_snapshot(group: Group, name: str, source: Path, target: Path, plan: dict[str, Any] | None) -> None:
    """Loads a checkpoint over `group` and saves a snapshot of it."""
    tp_layers.save(tp_layers.load(CLASSES[name], source, group=group, plan=plan), target, sharded=True)
    # Every rank returns once the snapshot is there.
    read_snapshot(target)


def save_toy_snapshot(group: Group, folder: Path, seed: int) -> None:
    """Saves a snapshot of `sharded_toy(seed)`."""
    tp_layers.save(sharded_toy(seed, group), folder, sharded=True)


def tensor_of(name: str, entry: Entry) -> torch.Tensor:
    """What safetensors reads where `entry` is."""
    with safe_open(entry.file, framework="pt") as file:
        return file.get_tensor(name)


def shard_of(name: str, stored: Sharded, spec: ShardSpec, rank: int, size: int) -> torch.Tensor:
    """The shard that `rank` of `size` holds by `spec`, from the stored shards; what they lack is NaN or 1."""
    target = torch.full(spec.local_shape(stored.shape, rank, size), float("nan")).to(stored.dtype)
    for stored_rank, entry in enumerate(stored.shards):
        ranges = spec.overlap(rank, size, stored.spec, stored_rank, len(stored.shards))
        shard = tensor_of(name, entry) if ranges else None
        for start, stop, at in ranges:
            target.narrow(spec.dim, at, stop - start).copy_(shard.narrow(spec.dim, start, stop - start))
    return target


def whole(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a snapshot, whole."""
    found = {}
    for name, entry in read_snapshot(folder).items():
        if isinstance(entry, Sharded):
            found[name] = shard_of(name, entry, ShardSpec(entry.spec.dim, (entry.spec.length,)), 0, 1)
        else:
            found[name] = tensor_of(name, entry)
    return found
