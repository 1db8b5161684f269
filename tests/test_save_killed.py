"""`save`: killed between any two steps, it leaves the old checkpoint or the new one, and the next save cleans up."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import tp_layers
from checkpoints import identical, names
from killed import held, kill_at_every_step, sharded_toy, traced
from toy import Toy
from tp_layers.group import Group
from tp_layers.launch import RankError, Ranks
from tp_layers.loader import whole
from tp_layers.loader.index import read_index

STEM = "diffusion_pytorch_model"
OLD, NEW, NEXT = 0, 1, 2
SINGLE, SEVERAL = "5GB", 300
# The max_shard_size of the old checkpoint and of the new one.
REPLACED = {
    "nothing by a single file": (None, SINGLE),
    "nothing by several": (None, SEVERAL),
    "a single file by a single one": (SINGLE, SINGLE),
    "a single file by several": (SINGLE, SEVERAL),
    "several by several": (SEVERAL, SEVERAL),
    "several by a single file": (SEVERAL, SINGLE),
}


def read(folder: Path) -> dict[str, torch.Tensor]:
    """The checkpoint in `folder` by the package's index; {} if there is none."""
    try:
        entries = read_index(folder)
    except FileNotFoundError:
        return {}
    found = {}
    for name, entry in entries.items():
        with safe_open(entry.file, framework="pt") as file:
            found[name] = file.get_tensor(name)
    return found


def read_single_first(folder: Path) -> dict[str, torch.Tensor]:
    """The same for a reader that takes a single file before an index, as transformers does."""
    single = folder / f"{STEM}.safetensors"
    return load_file(single) if single.is_file() else read(folder)


def whose(found: dict[str, torch.Tensor], old: dict[str, torch.Tensor]) -> int:
    """OLD or NEW; anything else is a failure."""
    if identical(found, old):
        return OLD
    assert identical(found, held(NEW)), "neither the old checkpoint nor the new one"
    return NEW


def check_pretrained(folder: Path, seed: int) -> None:
    """diffusers loads the same checkpoint; what is tied in a `Toy` it does not know of."""
    model, info = Toy.from_pretrained(folder, low_cpu_mem_usage=False, output_loading_info=True)
    assert sorted(info.pop("missing_keys")) == ["head.weight", "same_shift"] and not any(info.values()), info
    state, wanted = model.state_dict(), held(seed)
    assert [name for name, tensor in wanted.items() if not torch.equal(state[name], tensor.to(state[name].dtype))] == []


def check_next_save(folder: Path, limit: int | str) -> None:
    """A save that is not killed succeeds, and leaves its own files alone."""
    tp_layers.save(sharded_toy(NEXT), folder, max_shard_size=limit)
    assert identical(read(folder), held(NEXT))
    files = {entry.file.name for entry in read_index(folder).values()}
    index = {f"{STEM}.safetensors.index.json"} if limit == SEVERAL else set()
    assert set(names(folder)) == files | index | {"config.json", "mine.txt"}


@pytest.mark.parametrize(("before", "after"), REPLACED.values(), ids=REPLACED)
def test_a_save_killed_at_any_step_leaves_the_old_checkpoint_or_the_new_one(tmp_path, before, after):
    kept, folder, again = tmp_path / "kept", tmp_path / "folder", tmp_path / "again"
    kept.mkdir()
    (kept / "mine.txt").write_text("a file of the user")
    if before is not None:
        tp_layers.save(sharded_toy(OLD), kept, max_shard_size=before)
    old = read(kept)

    def restore() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(kept, folder)

    found, single_first = [], []
    for _ in kill_at_every_step(NEW, folder, restore, max_shard_size=after):
        found.append(whose(read(folder), old))
        single_first.append(whose(read_single_first(folder), old))
        if before is not None or found[-1] == NEW:
            check_pretrained(folder, found[-1])
        for limit in (SINGLE, SEVERAL):
            shutil.copytree(folder, again)
            check_next_save(again, limit)
            shutil.rmtree(again)
    # The new one from some step on, at the latest when the last of its files is in place.
    assert found == sorted(found) and single_first == sorted(single_first) and len(found) > 10
    assert found[0] == OLD and found[-1] == NEW
    assert identical(read(folder), held(NEW))


@pytest.mark.parametrize(("before", "after"), REPLACED.values(), ids=REPLACED)
def test_what_a_step_builds_on_is_on_the_disk_before_it(monkeypatch, tmp_path, before, after):
    folder = tmp_path / "folder"
    if before is not None:
        tp_layers.save(sharded_toy(OLD), folder, max_shard_size=before)
    index, single = f"{STEM}.safetensors.index.json", f"{STEM}.safetensors"
    steps = traced(monkeypatch, lambda: tp_layers.save(sharded_toy(NEW), folder, max_shard_size=after))
    for number, (step, name) in enumerate(steps):
        assert step != "move" or ("sync", name) in steps[:number], f"{name} was moved before it was on the disk"
    flip = steps.index(("move", index if after == SEVERAL else single))
    if (before, after) == (SEVERAL, SINGLE):
        flip = steps.index(("remove", index))
        assert steps.index(("move", single)) < flip
    # What was moved in before the flip has its name for good, and so has the flip before the old files go.
    moves = [number for number, (step, _) in enumerate(steps[:flip]) if step == "move"]
    removed = [number for number, (step, _) in enumerate(steps) if step == "remove" and number > flip]
    synced = [number for number, step in enumerate(steps) if step == ("sync", "folder")]
    assert any(moves[-1] < number < flip for number in synced)
    assert any(flip < number < min([*removed, len(steps)]) for number in synced)
    assert len(removed) >= (before is not None and before != after)


@pytest.mark.parametrize(("before", "after"), REPLACED.values(), ids=REPLACED)
def test_a_rank_that_dies_after_the_step_leaves_the_new_checkpoint(monkeypatch, tmp_path, before, after):
    if before is not None:
        tp_layers.save(sharded_toy(OLD), tmp_path, max_shard_size=before)

    def lost(steps):
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(whole.Steps, "settle", lost)
    with pytest.raises(RuntimeError, match="connection closed"):
        tp_layers.save(sharded_toy(NEW), tmp_path, max_shard_size=after)
    assert identical(read(tmp_path), held(NEW))


def save_until_killed(group: Group, folder: Path, report: Path, step: str) -> None:
    """Rank 1 is killed when it does `step` for the second time; rank 0 reports what it raises, after how long."""
    model, start, calls = sharded_toy(NEW, group), time.monotonic(), []
    function = getattr(whole, step)

    def die(*args):
        calls.append(args)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args)

    if group.rank == 1:
        setattr(whole, step, die)
    try:
        tp_layers.save(model, folder, max_shard_size=SEVERAL)
    except Exception as error:
        report.write_text(json.dumps([type(error).__name__, time.monotonic() - start]))


@pytest.mark.parametrize(
    ("before", "step"),
    [(SINGLE, "send"), (SEVERAL, "_ready")],
    ids=["a single file, while rank 0 receives", "several files, while rank 0 asks whether all can go on"],
)
def test_a_killed_rank_leaves_the_old_checkpoint_and_the_other_raises(tmp_path, before, step):
    folder, report = tmp_path / "folder", tmp_path / "report"
    tp_layers.save(sharded_toy(OLD), folder, max_shard_size=before)
    files = names(folder)
    with Ranks(2, timeout=60) as pool, pytest.raises(RankError, match="rank 1 of 2 failed:\nthe process died"):
        pool.run(save_until_killed, folder, report, step)
    kind, seconds = json.loads(report.read_text())
    assert kind in ("RuntimeError", "DistBackendError") and seconds < 30
    assert names(folder) == files and identical(read(folder), held(OLD))
