"""`save(sharded=True)`: killed between any two steps, it leaves the old snapshot or the new one."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

import tp_layers
from checkpoints import identical, names
from killed import held, kill_at_every_step, sharded_toy, traced
from snapshots import save_toy_snapshot, whole
from tp_layers.group import Group
from tp_layers.launch import RankError, Ranks
from tp_layers.loader import sharded
from tp_layers.loader.snapshot import MANIFEST

OLD, NEW, NEXT = 0, 1, 2
REPLACED = {"nothing": 0, "a snapshot of one rank": 1, "a snapshot of two ranks": 2}
replaced = pytest.mark.parametrize("before", REPLACED.values(), ids=REPLACED)


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The snapshot in `folder`; {} if there is none."""
    return whole(folder) if (folder / MANIFEST).exists() else {}


def check_next_save(folder: Path) -> None:
    """A save that is not killed succeeds, and leaves its own files alone."""
    tp_layers.save(sharded_toy(NEXT), folder, sharded=True)
    assert identical(read(folder), held(NEXT))
    files = json.loads((folder / MANIFEST).read_text())["files"]
    assert set(names(folder)) == {*files, MANIFEST, "config.json", "mine.txt"}


@replaced
def test_a_save_killed_at_any_step_leaves_the_old_snapshot_or_the_new_one(ranks, tmp_path, before):
    kept, folder = tmp_path / "kept", tmp_path / "folder"
    kept.mkdir()
    (kept / "mine.txt").write_text("a file of the user")
    if before:
        ranks(before, save_toy_snapshot, kept, OLD)
    old, found = read(kept), []

    def restore() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)

    for _ in kill_at_every_step(NEW, folder, restore, sharded=True):
        state = read(folder)
        assert identical(state, old) or identical(state, held(NEW)), "neither the old snapshot nor the new one"
        found.append(OLD if identical(state, old) else NEW)
        check_next_save(folder)
    # The new one from some step on.
    assert found == sorted(found) and len(found) > 10 and found[0] == OLD and found[-1] == NEW
    assert identical(read(folder), held(NEW))


@replaced
def test_what_a_step_builds_on_is_on_the_disk_before_it(ranks, monkeypatch, tmp_path, before):
    folder = tmp_path / "folder"
    if before:
        ranks(before, save_toy_snapshot, folder, OLD)
    steps = traced(monkeypatch, lambda: tp_layers.save(sharded_toy(NEW), folder, sharded=True))
    for number, (step, name) in enumerate(steps):
        assert step != "move" or ("sync", name) in steps[:number], f"{name} was moved before it was on the disk"
    (file,) = json.loads((folder / MANIFEST).read_text())["files"]
    flip = steps.index(("move", MANIFEST))
    removed = [
        number for number, (step, name) in enumerate(steps) if step == "remove" and name.startswith("tp_layers-")
    ]
    synced = [number for number, step in enumerate(steps) if step == ("sync", "folder")]
    config = steps.index(("move", "config.json"))
    # A rank brings the name of its file to the disk before rank 0 goes on.
    assert steps.index(("sync", file)) < synced[0] < config and any(config < number < flip for number in synced)
    assert any(flip < number < min([*removed, len(steps)]) for number in synced) and len(removed) == before


@replaced
def test_a_rank_that_dies_after_the_step_leaves_the_new_snapshot(ranks, monkeypatch, tmp_path, before):
    if before:
        ranks(before, save_toy_snapshot, tmp_path, OLD)

    def lost(steps, undo):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(sharded.Steps, "settle", lost)
    with pytest.raises(RuntimeError, match="connection closed"):
        tp_layers.save(sharded_toy(NEW), tmp_path, sharded=True)
    assert identical(read(tmp_path), held(NEW))


def save_until_killed(group: Group, folder: Path, report: Path) -> None:
    """Rank 1 is killed when its file is complete; rank 0 reports what it raises, after how long."""
    model, start = sharded_toy(NEW, group), time.monotonic()
    if group.rank == 1:
        sharded.sync_folder = lambda folder: os.kill(os.getpid(), signal.SIGKILL)
    try:
        tp_layers.save(model, folder, sharded=True)
    except Exception as error:
        report.write_text(json.dumps([type(error).__name__, time.monotonic() - start]))


def test_a_killed_rank_leaves_the_old_snapshot_and_the_other_raises(ranks, tmp_path):
    folder, report = tmp_path / "folder", tmp_path / "report"
    ranks(2, save_toy_snapshot, folder, OLD)
    (folder / "mine.txt").write_text("a file of the user")
    with Ranks(2, timeout=60) as pool, pytest.raises(RankError, match="rank 1 of 2 failed:\nthe process died"):
        pool.run(save_until_killed, folder, report)
    kind, seconds = json.loads(report.read_text())
    assert kind in ("RuntimeError", "DistBackendError") and seconds < 30
    assert identical(read(folder), held(OLD))
    check_next_save(folder)
