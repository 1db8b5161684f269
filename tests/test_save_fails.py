"""`save`: what fails on any one rank is raised on every rank, and leaves the folder as it was."""

import errno
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_layers
from checkpoints import identical, names, one_file, state_of
from spoilt import NO_MEMORY, Spoil, cannot, contents, failing, full_disk
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader import whole
from tp_layers.loader.index import read_index
from tp_layers.plans.spec import ShardSpec


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model in one file."""
    return one_file(tmp_path_factory)


def replaced_layer(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
    model.up = nn.Linear(6, 6)


# The rank that fails, how, and what the others say of it.
UNREADY = {
    "a model that was changed": (1, replaced_layer, "'up.weight' is (6, 6), not a shard of (8, 6): it was replaced"),
    "a config that cannot be written": (0, failing(None, "save_config", TypeError("no JSON")), "cannot be written: no"),
}
FAILING = {
    "a disk that is full": (0, full_disk(0), "No space left on device"),
    "a disk that fills up in the third file": (0, full_disk(1000), "No space left on device"),
    "a file that cannot be synchronised": (0, failing(os, "fsync", OSError(errno.EIO, "bad disk")), "bad disk"),
    "a file that cannot be renamed": (0, cannot(os, "replace"), "PermissionError: not yours"),
    "a second file that cannot be renamed": (0, cannot(os, "replace", lambda old, new: "00002" in new.name), "yours"),
    "an index that cannot be put in place": (0, cannot(os, "replace", lambda old, new: "index" in new.name), "yours"),
    "a shard that cannot be sent": (1, failing(whole, "_ready", NO_MEMORY), "RuntimeError: out of memory"),
    "a last shard that cannot be sent": (
        1,
        failing(whole, "_ready", NO_MEMORY, lambda own, spec, group: spec.dim == 1),
        "RuntimeError: out of memory",
    ),
    "a tensor that there is no room for": (0, failing(whole, "_ready", NO_MEMORY), "RuntimeError: out of memory"),
    "a shard that cannot be put in its place": (
        0,
        failing(ShardSpec, "put", NO_MEMORY, lambda spec, shard, full, rank, size: rank == 1),
        "RuntimeError: out of memory",
    ),
}


def save_spoilt(
    group: Group, source: Path, target: Path, rank: int = 0, spoil: Spoil | None = None
) -> tuple[str, str, float, float]:
    """What a save that fails on `rank` raises on this rank, after how long, and the next collective's result."""
    model = tp_layers.load(Toy, source, group=group, plan=PLAN)
    start, raised = time.monotonic(), ("nothing", "")
    with pytest.MonkeyPatch.context() as patch:
        if spoil is not None and group.rank == rank:
            spoil(patch, model)
        try:
            tp_layers.save(model, target, max_shard_size=300)
        except Exception as error:
            raised = ("ValueError" if isinstance(error, ValueError) else type(error).__name__, str(error))
    seconds, total = time.monotonic() - start, torch.ones(())
    dist.all_reduce(total, group=group.process_group)
    return (*raised, seconds, total.item())


def save_spoilt_as(group: Group, source: Path, target: Path, table: str, case: str) -> tuple[str, str, float, float]:
    rank, spoil, _ = {"UNREADY": UNREADY, "FAILING": FAILING}[table][case]
    return save_spoilt(group, source, target, rank, spoil)


def check_failure(results: list[tuple[str, str, float, float]], target: Path, rank: int, reason: str) -> None:
    for kind, message, seconds, total in results:
        # Still in step: the ranks' next collective is the same.
        assert kind == "OSError" and seconds < 10 and total == len(results)
        assert message.startswith(f"cannot write the checkpoint to {target}: rank {rank} of {len(results)}: ")
        assert reason in message


@pytest.mark.parametrize("size", [2, 4], ids=["two ranks", "four ranks"])
@pytest.mark.parametrize("case", FAILING)
def test_a_failure_of_one_rank_is_raised_on_every_rank_and_leaves_nothing(ranks, checkpoint, tmp_path, size, case):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    save_toy(old)
    before = contents(old)
    for target in (old, new):
        results = ranks(size, save_spoilt_as, checkpoint("Toy"), target, "FAILING", case)
        check_failure(results, target, FAILING[case][0], FAILING[case][2])
    # The checkpoint that was there still is, and nothing else.
    assert contents(old) == before
    assert not new.exists() or names(new) == []
    assert ranks(size, save_spoilt, checkpoint("Toy"), new)[0][0] == "nothing"
    assert identical(state_of(new), state_of(checkpoint("Toy")))


@pytest.mark.parametrize("case", UNREADY)
def test_what_is_found_before_writing_is_raised_on_every_rank(ranks, checkpoint, tmp_path, case):
    rank, _, reason = UNREADY[case]
    results = ranks(2, save_spoilt_as, checkpoint("Toy"), tmp_path / "new", "UNREADY", case)
    assert [kind for kind, *_ in results] == ["ValueError"] * 2 and all(seconds < 10 for *_, seconds, _ in results)
    assert all(reason in message for _, message, *_ in results)
    assert results[1 - rank][1].startswith(f"rank {rank} of 2 failed: ValueError: ")
    assert not (tmp_path / "new").exists()


def save_another(group: Group, source: Path, target: Path) -> str:
    """Rank 1 holds its `steps` in another dtype."""
    model = tp_layers.load(Toy, source, group=group, plan=PLAN)
    if group.rank == 1:
        model.steps = model.steps.int()
    with pytest.raises(ValueError) as raised:
        tp_layers.save(model, target)
    return str(raised.value)


def test_ranks_with_other_models_are_refused(ranks, checkpoint, tmp_path):
    messages = ranks(2, save_another, checkpoint("Toy"), tmp_path / "new")
    assert all("has another model" in message for message in messages) and not (tmp_path / "new").exists()


def test_old_files_that_cannot_be_removed_are_told_of_when_the_new_ones_are_in_place(ranks, checkpoint, tmp_path):
    save_toy(tmp_path)
    (tmp_path / "diffusion_pytorch_model-00001-of-00009.safetensors").mkdir()
    for kind, message, *_ in ranks(2, save_spoilt, checkpoint("Toy"), tmp_path):
        assert kind == "OSError" and "00001-of-00009" in message
        assert message.startswith(f"the checkpoint in {tmp_path} is complete, but older files there could not be")
    assert len({entry.file for entry in read_index(tmp_path).values()}) > 1


@pytest.mark.parametrize("below", ["", "transformer"], ids=["the path itself", "a folder on the way"])
def test_a_path_that_is_a_file_is_an_error_on_every_rank(ranks, checkpoint, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    results = ranks(2, save_spoilt, checkpoint("Toy"), file / below)
    check_failure(results, file / below, 0, "file")
    assert file.read_text() == "mine" and names(tmp_path) == ["file"]
