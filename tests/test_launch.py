"""The processes that stand for ranks: results in order, failures told, nobody left waiting."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from tp_layers.group import Group
from tp_layers.launch import RankError, Ranks


def add_up(group: Group, value: int) -> int:
    x = torch.tensor([value + group.rank])
    if group.size > 1:
        dist.all_reduce(x, group=group.process_group)
    return int(x)


def fail_on_one(group: Group) -> None:
    if group.rank == 1:
        raise ValueError("the shard of rank 1 is broken")
    dist.all_reduce(torch.ones(1), group=group.process_group)


def die(group: Group) -> None:
    if group.rank == 0:
        os._exit(3)
    dist.barrier(group=group.process_group)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_results_come_in_rank_order_from_a_group_of_that_size(ranks, size):
    assert ranks(size, add_up, 10) == [sum(10 + rank for rank in range(size))] * size


@pytest.mark.parametrize(
    ("function", "message"), [(fail_on_one, "the shard of rank 1 is broken"), (die, "process died")]
)
def test_a_failing_rank_is_named_within_seconds_and_the_next_run_works(function, message):
    with Ranks(2, timeout=60) as pool:
        assert pool.run(add_up, 1) == [3, 3]
        start = time.monotonic()
        with pytest.raises(RankError, match=message):
            pool.run(function)
        assert time.monotonic() - start < 30
        assert pool.run(add_up, 1) == [3, 3]
