"""`save(sharded=True)`: what fails on any one rank is raised on every rank, and leaves the folder as it was."""

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tp_layers
from checkpoints import identical, names
from killed import held, sharded_toy
from snapshots import save_toy_snapshot, whole
from spoilt import NO_MEMORY, cannot, contents, failing, full_disk
from tp_layers.group import Group
from tp_layers.loader import sharded
from tp_layers.loader.write import TensorFile

OLD, NEW = 0, 1
# The rank that fails, how, and what the others say of it.
FAILING = {
    "a disk that is full": (1, full_disk(0), "OSError: [Errno 28] No space left on device"),
    "a disk that fills up": (0, full_disk(600), "OSError: [Errno 28] No space left on device"),
    "a tensor that cannot be read": (1, failing(TensorFile, "append", NO_MEMORY), "RuntimeError: out of memory"),
    "a file that cannot be synchronised": (1, cannot(os, "fsync"), "PermissionError: not yours"),
    "a folder that cannot be made": (1, cannot(Path, "mkdir"), "PermissionError: not yours"),
    "a folder that cannot be synchronised": (0, cannot(sharded, "sync_folder"), "PermissionError: not yours"),
    "a config that cannot be put in place": (0, cannot(os, "replace"), "PermissionError: not yours"),
    "a manifest that cannot be put in place": (
        0,
        cannot(os, "replace", lambda old, new: new.suffix == ".json" and new.name != "config.json"),
        "PermissionError: not yours",
    ),
}


def save_spoilt(
    group: Group, folder: Path, case: str | None = None, arguments: dict[str, Any] | None = None
) -> tuple[str, str, float, float]:
    """What a save that fails on one rank raises on this one, after how long, and the next collective's result."""
    model = sharded_toy(NEW, group)
    rank, spoil, _ = FAILING[case] if case is not None else (0, None, "")
    start, raised = time.monotonic(), ("nothing", "")
    with pytest.MonkeyPatch.context() as patch:
        if spoil is not None and group.rank == rank:
            spoil(patch, model)
        try:
            tp_layers.save(model, folder, **{"sharded": True, **(arguments or {})})
        except Exception as error:
            raised = ("ValueError" if isinstance(error, ValueError) else type(error).__name__, str(error))
    seconds, total = time.monotonic() - start, torch.ones(())
    dist.all_reduce(total, group=group.process_group)
    return (*raised, seconds, total.item())


@pytest.mark.parametrize("size", [2, 4], ids=["two ranks", "four ranks"])
@pytest.mark.parametrize("case", FAILING)
def test_a_failure_of_one_rank_is_raised_on_every_rank_and_leaves_nothing(ranks, tmp_path, size, case):
    old, new = tmp_path / "old", tmp_path / "new"
    ranks(2, save_toy_snapshot, old, OLD)
    before, (rank, _, reason) = contents(old), FAILING[case]
    for target in (old, new):
        for kind, message, seconds, total in ranks(size, save_spoilt, target, case):
            assert kind == "OSError" and seconds < 10 and total == size
            assert message == f"cannot write the shards to {target}: rank {rank} of {size}: {reason}"
    assert contents(old) == before and identical(whole(old), held(OLD))
    assert not new.exists() or names(new) == []


def test_old_files_that_cannot_be_removed_are_told_of_when_the_new_ones_are_in_place(ranks, tmp_path):
    ranks(2, save_toy_snapshot, tmp_path, OLD)
    (tmp_path / "tp_layers-01234567-00001-of-00009.safetensors").mkdir()
    for kind, message, *_ in ranks(2, save_spoilt, tmp_path):
        assert kind == "OSError" and "01234567-00001-of-00009" in message
        assert message.startswith(f"the shards in {tmp_path} are complete, but older files there could not be removed")
    assert identical(whole(tmp_path), held(NEW))


def save_apart(group: Group, folder: Path) -> tuple[str, str]:
    """Every rank has a folder of its own, as without a shared file system."""
    own = folder / f"machine {group.rank}"
    with pytest.raises(OSError) as raised:
        tp_layers.save(sharded_toy(NEW, group), own, sharded=True)
    return str(own), str(raised.value)


def test_folders_that_the_ranks_do_not_share_are_refused(ranks, tmp_path):
    for own, message in ranks(2, save_apart, tmp_path):
        assert message.startswith(f"cannot write the shards to {own}: rank 0 of 2: FileNotFoundError: rank 1 wrote tp_")
        assert f"00002-of-00002.safetensors, which is not in {tmp_path}/machine 0 here: the folder must be" in message
        assert not Path(own).exists() or names(Path(own)) == []


def test_a_number_of_bytes_is_refused_for_a_snapshot(ranks, tmp_path):
    for limit in ("5GB", 300):
        results = [result[:2] for result in ranks(2, save_spoilt, tmp_path / "new", None, {"max_shard_size": limit})]
        assert all(kind == "ValueError" for kind, _ in results)
        assert all("sharded=True writes one file for each rank" in message for _, message in results)
    assert not (tmp_path / "new").exists()


def save_mixed(group: Group, folder: Path) -> str:
    with pytest.raises(ValueError) as raised:
        tp_layers.save(sharded_toy(NEW, group), folder, sharded=group.rank == 1)
    return str(raised.value)


def test_ranks_that_do_not_agree_on_the_kind_are_refused(ranks, tmp_path):
    assert all("has another model" in message for message in ranks(2, save_mixed, tmp_path / "new"))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("limit", ["5GB", 300], ids=["one file", "several files"])
def test_a_snapshot_is_not_put_beside_an_ordinary_checkpoint(ranks, tmp_path, limit):
    tp_layers.save(sharded_toy(OLD), tmp_path, max_shard_size=limit)
    before = contents(tmp_path)
    for kind, message, *_ in ranks(2, save_spoilt, tmp_path):
        assert kind == "ValueError" and ", which is the weights of an ordinary checkpoint: save to a folder" in message
    assert contents(tmp_path) == before


def test_an_ordinary_checkpoint_is_not_put_beside_a_snapshot(ranks, tmp_path):
    ranks(2, save_toy_snapshot, tmp_path, OLD)
    before = contents(tmp_path)
    for kind, message, *_ in ranks(2, save_spoilt, tmp_path, None, {"sharded": False}):
        assert kind == "ValueError" and f"{tmp_path} has a sharded snapshot (tp_layers.json): save to" in message
    assert contents(tmp_path) == before
