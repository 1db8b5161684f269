"""Sums that are under way: who starts one gives way to the threads that take it."""

import os
import sys

import pytest
import torch

from seeded import per_rank
from tp_layers.collectives import all_reduce
from tp_layers.group import Group
from tp_layers.under_way import all_reduce_later, start_all_reduce


def given_way(group: Group) -> list[tuple[bool, int]]:
    """Of each way to sum: whether the sum is right, and how often this thread gave way."""
    xs = per_rank((3, 5), group.size, 1, torch.float32)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for way in (
            lambda x: start_all_reduce(x, group)(),
            lambda x: all_reduce_later(x, group) + 0,
            lambda x: all_reduce(x, group),
        ):
            calls: list[None] = []
            patch.setattr(os, "sched_yield", lambda calls=calls: calls.append(None))
            found.append((torch.equal(way(xs[group.rank].clone()), sum(xs)), len(calls)))
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no thread waits for a tick")
@pytest.mark.parametrize("size", [1, 2, 3])
def test_who_starts_a_sum_gives_way_once(ranks, size):
    wanted = [(True, int(size > 1)), (True, int(size > 1)), (True, 0)]
    assert ranks(size, given_way) == [wanted] * size
