"""Sums that are under way: who starts one gives way to the threads that take it, and what cannot be summed."""

import os
import sys

import pytest
import torch
from torch.autograd.forward_ad import dual_level, make_dual

from seeded import per_rank
from tp_layers.collectives import all_reduce, replicate
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


def refused_tangents(group: Group) -> tuple[list[str], bool]:
    """What is said of a forward-mode derivative by whatever sums in place, or hands on to what does."""
    x = torch.ones(2, 3)
    calls = [
        lambda dual: all_reduce(dual, group),
        lambda dual: replicate(dual, group),
        lambda dual: start_all_reduce(dual, group),
        lambda dual: all_reduce_later(dual, group),
    ]
    said = []
    with dual_level():
        for call in calls:
            try:
                call(make_dual(x, torch.ones(2, 3)))
                said.append("")
            except NotImplementedError as error:
                said.append(str(error))
    return said, bool((x == 1).all())


@pytest.mark.parametrize("size", [1, 2])
def test_a_forward_mode_derivative_is_refused_not_left_one_ranks(ranks, size):
    for said, untouched in ranks(size, refused_tangents):
        assert untouched and len(said) == 4
        assert all("forward-mode derivatives are not summed" in text if size > 1 else not text for text in said)
