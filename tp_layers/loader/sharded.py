"""A sharded model written as a snapshot: every rank writes its own shards, and nothing is sent between ranks."""

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import nn

from ..exchange import broadcast_text
from ..group import Group
from .snapshot import FILE_VERSIONS, KEY, MANIFEST, VERSION
from .steps import Steps
from .unfinished import Unfinished, new_token, remove_unfinished
from .write import Stored, TensorFile, by_width, sync_folder, write_bytes

SHARDS = re.compile(r"tp_layers-[0-9a-f]{8}-\d{5}-of-\d{5}\.safetensors")


def save_shards(
    model: nn.Module, folder: Path, stored: Sequence[Stored], configs: dict[str, bytes], group: Group
) -> None:
    """Writes this rank's shards of `stored`, and on rank 0 what is whole. All ranks call it; if one fails, all raise.

    Files have names of this save's own. The manifest, which replaces the old one in one step once all files are on the
    disk, makes them the snapshot that is read; the files of the old one go last. Memory: one tensor at a time on its
    way from the device, none from the CPU.

    Raises:
        OSError: a rank failed, which is named, or rank 0 does not see the files of the others.
    """
    token = broadcast_text(new_token(), group)
    names = [f"tp_layers-{token}-{rank + 1:05d}-of-{group.size:05d}.safetensors" for rank in range(group.size)]
    own = folder / names[group.rank]
    steps = Steps(group, f"cannot write the shards to {folder}")
    steps.attempt(_write_own, model, own, stored, group)
    if not steps.failed() and group.rank == 0:
        steps.attempt(_place, Unfinished(folder, token), names, configs)
    # Where a rank has died, nobody knows whether rank 0 has named the files: they stay, for the next save to remove.
    steps.settle(undo=lambda: own.unlink(missing_ok=True))
    steps = Steps(group, f"the shards in {folder} are complete, but older files there could not be removed")
    if group.rank == 0:
        steps.attempt(_clean, Unfinished(folder, token), names)
    steps.settle()


def _write_own(model: nn.Module, path: Path, stored: Sequence[Stored], group: Group) -> None:
    state: dict[str, torch.Tensor] = model.state_dict()
    mine = [item for item in stored if group.rank == 0 or item.spec is not None]
    items = by_width([replace(item, shape=tuple(state[item.name].shape)) for item in mine])
    cuts = {item.name: asdict(item.spec) for item in stored if item.spec is not None}
    # As it was before there were granules, for readers of that time.
    specs = {name: {key: value for key, value in cut.items() if value is not None} for name, cut in cuts.items()}
    version = FILE_VERSIONS[any("granules" in cut for cut in specs.values())]
    about = {"version": version, "rank": group.rank, "size": group.size, "specs": specs}
    path.parent.mkdir(parents=True, exist_ok=True)
    file = TensorFile(path, items, {"format": "pt", KEY: json.dumps(about)})
    try:
        for item in items:
            file.append(state[item.name])
        file.close()
    except BaseException:
        file.abandon()
        raise
    sync_folder(path.parent)


def _place(unfinished: Unfinished, names: list[str], configs: dict[str, bytes]) -> None:
    """Makes the files the snapshot that is read; nothing has changed for readers if this fails."""
    for rank, name in enumerate(names):
        if not (unfinished.folder / name).is_file():
            raise FileNotFoundError(
                f"rank {rank} wrote {name}, which is not in {unfinished.folder} here: the folder must be one that all "
                f"ranks share"
            )
    try:
        unfinished.make()
        for name, data in {**configs, MANIFEST: _manifest(names)}.items():
            write_bytes(unfinished.path / name, data)
        for name in configs:
            unfinished.move(name)
        sync_folder(unfinished.folder)
        unfinished.move(MANIFEST)
    except BaseException:
        unfinished.discard()
        raise


def _manifest(names: list[str]) -> bytes:
    return (json.dumps({"version": VERSION, "size": len(names), "files": names}, indent=2) + "\n").encode()


def _clean(unfinished: Unfinished, names: list[str]) -> None:
    """Removes the files of earlier snapshots, and what saves that were killed have left.

    Neither if another save has put its own in place meanwhile, as it can on a file system without locks: nothing of it
    may be removed.
    """
    folder = unfinished.folder
    sync_folder(folder)
    if (folder / MANIFEST).read_bytes() != _manifest(names):
        unfinished.discard()
        return
    for file in list(folder.iterdir()):
        if SHARDS.fullmatch(file.name) and file.name not in names:
            file.unlink()
    remove_unfinished(folder)
