"""`save`: what fails on rank 0 is raised on every rank, and leaves the folder as it was."""

import errno
import io
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_layers
from checkpoints import identical, names, one_file, state_of
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader import write


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model in one file."""
    return one_file(tmp_path_factory)


class FullDisk(io.FileIO):
    """A file on a disk with room for `left` bytes in all."""

    left = 0

    def write(self, data: Any) -> int:
        """Takes the data while there is room."""
        if len(data) > FullDisk.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullDisk.left -= len(data)
        return super().write(data)


def full_disk(left: int) -> Callable[[pytest.MonkeyPatch, nn.Module], None]:
    def spoil(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
        FullDisk.left = left
        # As open() does: a buffer before the file, which writes the rest when it is closed.
        patch.setattr(write, "open", lambda path, mode: io.BufferedWriter(FullDisk(path, mode)), raising=False)

    return spoil


def failing(what: str, error: Exception, owner: Any = os) -> Callable[[pytest.MonkeyPatch, nn.Module], None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error

    def spoil(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
        patch.setattr(owner or model, what, refuse)

    return spoil


SPOILERS = {
    "a disk that is full": (full_disk(0), "No space left on device"),
    "a disk that fills up in the third file": (full_disk(1000), "No space left on device"),
    "a file that cannot be synchronised": (failing("fsync", OSError(errno.EIO, "input/output error")), "input/output"),
    "a file that cannot be renamed": (failing("replace", PermissionError("not yours")), "not yours"),
    "an index that cannot be written": (failing("write_text", OSError("no index"), Path), "no index"),
    "a config that cannot be written": (
        failing("save_config", TypeError("not serialisable"), None),
        "not serialisable",
    ),
}


def save_spoilt(group: Group, source: Path, target: Path, spoiler: str | None) -> tuple[str, str, float, float]:
    """What a save that fails on rank 0 raises on this rank, after how long, and the next collective's result."""
    model = tp_layers.load(Toy, source, group=group, plan=PLAN)
    start, raised = time.monotonic(), ("nothing", "")
    with pytest.MonkeyPatch.context() as patch:
        if spoiler is not None:
            SPOILERS[spoiler][0](patch, model)
        try:
            tp_layers.save(model, target, max_shard_size=300)
        except Exception as error:
            raised = (type(error).__name__, str(error))
    seconds, total = time.monotonic() - start, torch.ones(())
    dist.all_reduce(total, group=group.process_group)
    return (*raised, seconds, total.item())


def check_failure(results: list[tuple[str, str, float, float]], target: Path, reason: str) -> None:
    for kind, message, seconds, total in results:
        # Still in step: the ranks' next collective is the same.
        assert kind == "OSError" and seconds < 10 and total == len(results)
        assert message.startswith(f"cannot write the checkpoint to {target}: ") and reason in message


@pytest.mark.parametrize("size", [2, 4], ids=["two ranks", "four ranks"])
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_failure_of_rank_zero_is_raised_on_every_rank_and_leaves_nothing(ranks, checkpoint, tmp_path, size, spoiler):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    save_toy(old)
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    for target in (old, new):
        results = ranks(size, save_spoilt, checkpoint("Toy"), target, spoiler)
        check_failure(results, target, SPOILERS[spoiler][1])
    # The checkpoint that was there still is, and nothing else.
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before
    assert not new.exists() or names(new) == []
    assert ranks(size, save_spoilt, checkpoint("Toy"), new, None)[0][0] == "nothing"
    assert identical(state_of(new), state_of(checkpoint("Toy")))


@pytest.mark.parametrize("below", ["", "transformer"], ids=["the path itself", "a folder on the way"])
def test_a_path_that_is_a_file_is_an_error_on_every_rank(ranks, checkpoint, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    results = ranks(2, save_spoilt, checkpoint("Toy"), file / below, None)
    check_failure(results, file / below, "file")
    assert file.read_text() == "mine" and names(tmp_path) == ["file"]
