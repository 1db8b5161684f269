"""What the file system is told beforehand: a window of what comes next, once, and only while a disk is waited for."""

import os
import time

import pytest
import torch

from read_case import values, write
from tp_layers.loader import ahead, read
from tp_layers.loader.ahead import Ahead
from tp_layers.loader.parts import Part, parts_of
from tp_layers.plans.spec import ShardSpec


@pytest.fixture
def told(monkeypatch) -> list[tuple[int, int]]:
    """The advice given, as (position, bytes)."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, offset, count, advice: given.append((offset, count)))
    monkeypatch.setattr(ahead, "STEP_BYTES", 64)
    monkeypatch.setattr(ahead, "WINDOW_BYTES", 128)
    monkeypatch.setattr(ahead, "GAP_BYTES", 1 << 20)
    return given


@pytest.fixture
def part(tmp_path) -> Part:
    """Half the rows of a tensor of 1 KiB."""
    return parts_of(write(tmp_path, values((32, 8), torch.float32)), ShardSpec(0, (32,)), 1, 2)[0]


def test_a_window_is_announced_in_steps_and_none_of_it_twice(told, part):
    first = part.entry.offset + 512
    made = Ahead([part, part])
    made.reached(0, 0.0)
    assert told == [(first, 64), (first + 64, 64)]
    made.reached(0, 0.0)
    made.reached(0, 0.125)
    assert told[2:] == [(first + 128, 64)]
    # The next tensor's beginning comes before this one's end is read.
    made.reached(0, 1.0)
    assert told[-2:] == [(first, 64), (first + 64, 64)]
    made.reached(1, 0.75)
    made.reached(1, 1.0)
    made.close()
    assert told[-2:] == [(first + 384, 64), (first + 448, 64)]


def test_what_has_been_read_already_is_not_announced(told, part):
    made = Ahead([part])
    made.reached(0, 0.5)
    made.close()
    first = part.entry.offset + 512
    assert told == [(first + 256, 64), (first + 320, 64)]


def test_gaps_between_columns_are_announced_along(told, tmp_path, monkeypatch):
    entry = write(tmp_path, values((8, 16), torch.float32))
    (columns,) = parts_of(entry, ShardSpec(1, (16,)), 1, 2)
    made = Ahead([columns])
    monkeypatch.setattr(ahead, "WINDOW_BYTES", 1 << 20)
    made.reached(0, 0.0)
    made.close()
    assert sum(count for _, count in told) == 8 * 16 * 4 and told[0] == (entry.offset, 64)


@pytest.mark.parametrize("seconds", [0.0, 0.01], ids=["memory", "a disk"])
def test_only_a_disk_is_told(told, part, monkeypatch, seconds):
    system = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(seconds)
        return system(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(read, "TICK_BYTES", 64)
    # Slower than memory, faster than the sleep.
    monkeypatch.setattr(read, "DISK_RATE", 64 / 0.005)
    target = torch.empty(16, 8)
    assert read.read_shards([read.Job("x", part, target)], 1) == 512
    assert bool(told) == bool(seconds)


def test_a_file_system_that_takes_no_advice_is_read_all_the_same(part, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(29, "Illegal seek")

    monkeypatch.setattr(os, "posix_fadvise", refuse)
    made = Ahead([part])
    made.reached(0, 0.0)
    made.close()
    monkeypatch.delattr(os, "posix_fadvise")
    made = Ahead([part])
    made.reached(0, 0.0)
    made.close()
