"""What the ranks send: the collectives each function makes, none on one rank, and to which ranks of the group."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from calls import Calls
from seeded import integers
from tp_layers import exchange
from tp_layers.collectives import all_gather, all_reduce, replicate, split
from tp_layers.gradients import sum_gradient
from tp_layers.group import Group
from tp_layers.plans.spec import ShardSpec


def alone(group):
    """At size 1: whether each function returns its argument, and the collectives that ran."""
    x, spec = integers(3, 4, seed=1), ShardSpec(-1, (3, 1))
    leaf = x.clone().requires_grad_()
    column_view = x[:, :2]
    scale = nn.Parameter(torch.ones(2))
    with Calls() as calls:
        same = [
            result is given
            for given in (x, leaf, column_view)
            for result in (
                all_reduce(given, group),
                all_reduce(given, group, consumer="split"),
                replicate(given, group),
                all_gather(given, group, spec),
                split(given, group, spec),
            )
        ]
        sum_gradient(scale, group)
        (scale * 3).sum().backward()
        largest = exchange.largest(x, group)
        text = exchange.broadcast_text("a text", group)
    return same, torch.equal(largest, x), text, scale.grad.tolist(), calls.names


def test_size_one_returns_its_argument_and_makes_no_collective(ranks):
    for same, equal, text, grad, names in [alone(Group()), *ranks(1, alone)]:
        assert len(same) == 15 and all(same)
        assert (equal, text, grad, names) == (True, "a text", [3.0, 3.0], [])


def named_calls(group):
    """How many collectives each function makes, forward and backward."""
    spec, x = ShardSpec(-1, (12,)), torch.ones(2, 12)
    shard = spec.take(x, group.rank, group.size)
    found = {}
    for name, function, given in (
        ("all_reduce", lambda t: all_reduce(t, group), x),
        ("all_reduce_split", lambda t: all_reduce(t, group, consumer="split"), x),
        ("replicate", lambda t: replicate(t, group), x),
        ("all_gather", lambda t: all_gather(t, group, spec), shard),
        ("split", lambda t: split(t, group, spec), x),
    ):
        leaf = given.clone().requires_grad_()
        with Calls() as forward:
            result = function(leaf * 1)
        with Calls() as backward:
            result.sum().backward()
        found[name] = len(forward.names), len(backward.names)
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_each_function_makes_the_collectives_of_the_table_and_no_more(ranks, size):
    for found in ranks(size, named_calls):
        assert found == {
            "all_reduce": (1, 0),
            "all_reduce_split": (1, 1),
            "replicate": (0, 1),
            "all_gather": (1, 0),
            "split": (0, 1),
        }


def passed_around(group):
    """A tensor handed to the next rank, and rank 0's text, over ranks 1 and 3 of the world and over all of them."""
    some = dist.new_group([1, 3])
    groups = [group] if group.rank % 2 == 0 else [group, Group.of(some)]
    found = []
    for over in groups:
        # A column view: what is sent need not be contiguous.
        mine, got = integers(3, 6, seed=10 + over.rank)[:, 1:4], torch.empty(3, 3)
        for sender in range(over.size):
            to = (sender + 1) % over.size
            if over.rank == sender:
                exchange.send(mine, over, to)
            if over.rank == to:
                filled = exchange.receive(got, over, sender)
        text = exchange.broadcast_text(f"text of world rank {group.rank}", over)
        found.append((over.rank, over.size, filled is got, got, text))
    return found


def test_tensors_and_texts_go_by_ranks_of_the_group(ranks):
    found = ranks(4, passed_around)
    assert [len(over) for over in found] == [1, 2, 1, 2]
    for over in found:
        for (rank, size, same, got, text), first in zip(over, (0, 1), strict=False):
            assert same
            assert torch.equal(got, integers(3, 6, seed=10 + (rank - 1) % size)[:, 1:4])
            assert text == f"text of world rank {first}"
