"""`save`: of two that write to one folder at a time one is refused on every rank, and the other is complete."""

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import tp_layers
from checkpoints import identical, names
from killed import held, sharded_toy
from snapshots import tensor_of, whole
from spoilt import contents
from tp_layers.group import Group
from tp_layers.loader.index import read_index
from tp_layers.loader.lock import NAME, SaveLock
from tp_layers.loader.snapshot import is_snapshot

OLD, NEW = 0, 1
KINDS: dict[str, dict[str, Any]] = {
    "one file": {"max_shard_size": "5GB"},
    "several files": {"max_shard_size": 300},
    "sharded": {"sharded": True},
}
kinds = pytest.mark.parametrize("how", KINDS.values(), ids=KINDS)
BUSY = "another save is writing to {}: let one group of ranks save, or each to a folder of its own"


def attempt(group: Group, folder: Path, how: dict[str, Any], seed: int = NEW) -> str:
    """What a save says; nothing where it saves."""
    try:
        tp_layers.save(sharded_toy(seed, group), folder, **how)
    except ValueError as error:
        return str(error)
    return ""


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint that is there, of either kind."""
    if is_snapshot(folder):
        return whole(folder)
    return {name: tensor_of(name, entry) for name, entry in read_index(folder).items()}


def save_as_replicas(group: Group, folder: Path, how: dict[str, Any], times: int) -> tuple[int, list[str]]:
    """Two replicas of two ranks each save to `folder` at once, and read it when both are done."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "tp"))
    over, said = Group.of(mesh["tp"]), []
    for seed in range(times):
        dist.barrier(group=group.process_group)
        said.append(attempt(over, folder, how, seed))
        dist.barrier(group=group.process_group)
        assert identical(read(folder), held(seed))
    return mesh.get_coordinate()[0], said


@kinds
def test_replicas_that_save_to_one_folder_leave_a_whole_checkpoint(ranks, tmp_path, how):
    folder = tmp_path / "new" / "folder"
    results = ranks(4, save_as_replicas, folder, how, 6)
    (first, second), (third, fourth) = ([said for where, said in results if where == replica] for replica in (0, 1))
    for said in zip(first, second, third, fourth, strict=True):
        assert "" in said and all(BUSY.format(folder) in message for message in said if message)
        # The ranks of a group save, or not, together.
        assert bool(said[0]) == bool(said[1]) and bool(said[2]) == bool(said[3])
    assert NAME not in names(folder)


@kinds
def test_a_folder_that_is_being_written_to_is_refused_and_is_as_it_was(ranks, tmp_path, how):
    tp_layers.save(sharded_toy(OLD), tmp_path, **how)
    with SaveLock(tmp_path) as other:
        other.take()
        before = contents(tmp_path)
        for message in ranks(2, attempt, tmp_path, how):
            assert BUSY.format(tmp_path) in message
        assert contents(tmp_path) == before and NAME in before
    assert ranks(2, attempt, tmp_path, how) == ["", ""]
    assert identical(read(tmp_path), held(NEW)) and NAME not in names(tmp_path)


@kinds
def test_the_lock_is_held_until_the_old_files_are_gone(monkeypatch, tmp_path, how):
    said = []
    for module in ("place", "sharded"):
        monkeypatch.setattr(
            f"tp_layers.loader.{module}.remove_unfinished", lambda folder: said.append(attempt(Group(), folder, how))
        )
    tp_layers.save(sharded_toy(OLD), tmp_path, **how)
    assert said == [BUSY.format(tmp_path)]


def test_the_lock_of_a_save_that_was_killed_is_none(tmp_path):
    (tmp_path / NAME).write_text("")
    assert attempt(Group(), tmp_path, {}) == "" and NAME not in names(tmp_path)


def test_the_lock_of_a_file_that_was_removed_meanwhile_is_none(monkeypatch, tmp_path):
    calls = []

    def flock(descriptor: int, operation: int) -> None:
        calls.append(operation)
        if len(calls) == 1:
            # Another save ends after this one has opened its lock, with the folder that it made.
            (tmp_path / "new" / NAME).unlink()
            (tmp_path / "new").rmdir()
        real(descriptor, operation)

    real = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", flock)
    with SaveLock(tmp_path / "new") as first, SaveLock(tmp_path / "new") as second:
        first.take()
        with pytest.raises(ValueError, match="another save is writing to"):
            second.take()
    assert names(tmp_path) == []


def test_a_process_that_was_forked_meanwhile_does_not_keep_the_lock(monkeypatch, tmp_path):
    # The name stays, so that the lock of this very file is asked for again.
    monkeypatch.setattr(Path, "unlink", lambda *args, **kwargs: None)
    first = SaveLock(tmp_path)
    first.take()
    inherited = os.dup(first._descriptor)
    first.release()
    with SaveLock(tmp_path) as second:
        second.take()
    os.close(inherited)


@kinds
def test_a_file_system_without_locks_is_written_to(monkeypatch, tmp_path, how):
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr(fcntl, "flock", flock)
    for seed in (OLD, NEW):
        assert attempt(Group(), tmp_path, how, seed) == ""
        assert identical(read(tmp_path), held(seed)) and NAME not in names(tmp_path)


OTHERS = {"one file": "several files", "several files": "one file", "sharded": "sharded"}


@pytest.mark.parametrize("kind", KINDS)
def test_without_locks_nothing_is_removed_once_another_save_is_in_place(monkeypatch, tmp_path, kind):
    """The other one is done just before this one removes what it takes for old files."""
    syncs: list[Path] = []
    monkeypatch.setattr(SaveLock, "take", lambda self: None)

    def sync(folder: Path) -> None:
        syncs.append(folder)
        # The last of this save's: see `clean`.
        if len(syncs) == (3 if kind == "sharded" else 2):
            assert attempt(Group(), tmp_path, KINDS[OTHERS[kind]], NEW) == ""

    for module in ("place", "sharded"):
        monkeypatch.setattr(f"tp_layers.loader.{module}.sync_folder", sync)
    assert attempt(Group(), tmp_path, KINDS[kind], OLD) == ""
    assert len(syncs) > 3 and identical(read(tmp_path), held(NEW))
    assert not [name for name in names(tmp_path) if name.endswith(".tmp")]
