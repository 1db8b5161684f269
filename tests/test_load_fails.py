"""`load`: what fails on one rank, at any stage, is raised on every rank within seconds, and no rank is left waiting."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tp_layers
from checkpoints import state_of
from toy import PLAN, Toy, save_toy
from tp_layers import agree
from tp_layers.group import Group
from tp_layers.loader import fill, read

SECONDS = 30


@pytest.fixture
def toy(tmp_path) -> Path:
    """The folder of a `Toy`."""
    save_toy(tmp_path)
    return tmp_path


def index(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """The folder this rank sees is broken: a disk of its own."""
    own = Path.is_file
    patch.setattr(Path, "is_file", lambda path: path.suffix != ".safetensors" and own(path))


def allocation(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """There is no memory for the shards."""

    def empty(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return empty if name == "empty" else getattr(torch, name)

    patch.setattr(fill, "torch", Torch())


def reading(which: int) -> Any:
    """The disk fails at read number `which`; the last one is -1."""

    def fail(patch: pytest.MonkeyPatch, folder: Path) -> None:
        system, seen = os.preadv, [0]
        _, report = tp_layers.load(Toy, folder, plan=PLAN, group=Group(1, 4), report=True)
        total = report.bytes_read

        def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            seen[0] += sum(map(len, buffers))
            if which == 0 or seen[0] >= total:
                raise OSError(5, "Input/output error")
            return system(descriptor, buffers, offset)

        patch.setattr(os, "preadv", preadv)

    return fail


WHERE = r"rank 1 cannot read '[\w.]+' at offset \d+ of {file}: .*Input/output error"
STAGES = {
    "index": (index, "no safetensors weights"),
    "allocation": (allocation, "out of memory"),
    "first read": (reading(0), WHERE),
    "last read": (reading(-1), WHERE),
}


def message(group: Group, stage: str, folder: Path) -> tuple[str, float, bool]:
    """What a rank is told when rank 1 fails, after how many seconds, and whether it can load afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            STAGES[stage][0](patch, folder)
        start = time.monotonic()
        with pytest.raises((OSError, ValueError, torch.OutOfMemoryError)) as error:
            tp_layers.load(Toy, folder, plan=PLAN, group=group)
        seconds = time.monotonic() - start
    model = tp_layers.load(Toy, folder, plan=PLAN, group=group)
    return str(error.value), seconds, torch.equal(model.scale, state_of(folder)["scale"])


@pytest.mark.parametrize("stage", STAGES)
def test_every_rank_raises(ranks, toy, stage):
    told = STAGES[stage][1].replace("{file}", re.escape(str(toy / "diffusion_pytorch_model.safetensors")))
    for rank, (said, seconds, again) in enumerate(ranks(4, message, stage, toy)):
        assert re.search(told, said), said
        assert rank == 1 or said.startswith("rank 1 of 4 failed: ")
        assert seconds < SECONDS and again


def slow(group: Group, folder: Path) -> tuple[str, float]:
    """Rank 1 fails at once; the disk of the others would take minutes."""
    system = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if group.rank == 1:
            raise OSError(5, "Input/output error")
        time.sleep(0.5)
        return system(descriptor, [buffers[0][:4]], offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "preadv", preadv)
        patch.setattr(read, "TICK_BYTES", 4)
        start = time.monotonic()
        with pytest.raises((OSError, ValueError)) as error:
            tp_layers.load(Toy, folder, plan=PLAN, group=group)
    return str(error.value), time.monotonic() - start


def test_no_rank_reads_on_for_long_after_another_has_failed(ranks, toy):
    for rank, (said, seconds) in enumerate(ranks(4, slow, toy)):
        assert "rank 1 cannot read" in said and (rank == 1) == said.startswith("rank 1 cannot")
        assert seconds < 5 * agree.Alarm.SECONDS + 5


def alarms(group: Group) -> list[bool]:
    """Whether a look at an alarm raises: before any, after rank 0 rang the first, and at the next load's."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agree.Alarm, "SECONDS", 0.0)
        first, second = agree.Alarm(group), agree.Alarm(group)
        for alarm, rings in ((first, False), (first, True), (second, False)):
            if rings and group.rank == 0:
                alarm.ring("rank 0 failed")
            agree.agreed(group, lambda: None)
            try:
                alarm.check()
                seen.append(False)
            except ValueError as error:
                assert str(error) == "rank 0 failed"
                seen.append(True)
            agree.agreed(group, lambda: None)
    return seen


def test_an_alarm_is_heard_by_all_ranks_and_belongs_to_one_load(ranks):
    assert ranks(4, alarms) == [[False, True, False]] * 4
    assert alarms(Group()) == alarms(Group(1, 2)) == [False, False, False]
