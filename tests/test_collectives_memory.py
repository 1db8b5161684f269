"""What the collectives read and write: tensors of any strides, results that last, the same bits on every rank."""

import pytest
import torch

from seeded import integers, per_rank
from tp_layers import exchange
from tp_layers.collectives import all_gather, all_reduce, replicate, split
from tp_layers.plans.spec import ShardSpec

SIZES = [1, 2, 3, 4]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def expanded_gradients(group):
    """The gradients of each collective for `result.sum()`, whose incoming gradient is one expanded element."""
    spec = ShardSpec(-1, (12,))
    full = torch.ones(2, 12)
    found = []
    for function, x in (
        (lambda t: all_reduce(t, group, consumer="split"), full),
        (lambda t: replicate(t, group), full),
        (lambda t: all_gather(t, group, spec), spec.take(full, group.rank, group.size)),
        (lambda t: split(t, group, spec), full),
    ):
        leaf = x.clone().requires_grad_()
        function(leaf * 1).sum().backward()
        found.append(leaf.grad)
    return found


@pytest.mark.parametrize("size", SIZES)
def test_an_expanded_gradient_is_reduced_right(ranks, size):
    full = torch.ones(2, 12)
    for reduce, replica, gather, part in ranks(size, expanded_gradients):
        assert torch.equal(reduce, full * size) and torch.equal(replica, full * size)
        assert torch.equal(gather, torch.ones(2, 12 // size)) and torch.equal(part, full)


def shards_with_strides(group):
    """Shards that are transposed, a column view, or expanded, gathered along the last dim."""
    spec = ShardSpec(-1, (9 * group.size, 3 * group.size))
    full = integers(5, 12 * group.size, seed=3)
    shard = spec.take(full, group.rank, group.size)
    column_view = torch.full((5, 30), -99.0)[:, 7:19]
    column_view.copy_(shard)
    alike = shard[:1].expand(5, -1)
    return all(
        torch.equal(all_gather(x, group, spec), wanted)
        for x, wanted in (
            (shard.t().contiguous().t(), full),
            (column_view, full),
            (alike, full[:1].expand(5, -1)),
        )
    )


@pytest.mark.parametrize("size", SIZES)
def test_all_gather_takes_shards_of_any_strides(ranks, size):
    assert all(ranks(size, shards_with_strides))


def refused_views(group):
    """For views that are not contiguous: the refusal on both paths, and whether the memory around is as it was."""
    found = {}
    base = integers(4, 6, seed=group.rank)
    for name, view in (
        ("column_view", base[:, :3]),
        ("every_other_row", base[::2]),
        ("transposed", base.t()),
        ("expanded", base[:1].expand(4, 6)),
    ):
        for grad in (False, True):
            before = base.clone()
            x = view.detach().requires_grad_(grad)
            try:
                all_reduce(x, group)
                message = "accepted"
            except ValueError as error:
                message = str(error)
            found[name, grad] = message, torch.equal(base, before)
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_all_reduce_refuses_what_is_not_contiguous_and_leaves_the_neighbours(ranks, size):
    for found in ranks(size, refused_views):
        assert len(found) == 8
        for message, untouched in found.values():
            assert "cannot all-reduce a tensor of shape" in message and "strides" in message
            assert untouched


def two_at_once(group):
    """Whether the first of two results of each function has its values when the second is there."""
    spec = ShardSpec(-1, (12,))
    kept = []
    for function, shape in (
        (lambda t: all_reduce(t, group), (2, 12)),
        (lambda t: all_gather(t, group, spec), (2, 12 // group.size)),
        (lambda t: split(t, group, spec), (2, 12)),
        (lambda t: replicate(t, group), (2, 12)),
        (lambda t: exchange.largest(t, group), (2, 12)),
    ):
        first = function(torch.full(shape, 1.0))
        before = first.clone()
        second = function(torch.full(shape, 2.0))
        kept.append(torch.equal(first, before) and torch.equal(second, 2 * before))
    return kept


@pytest.mark.parametrize("size", SIZES)
def test_two_results_alive_at_once_keep_their_values(ranks, size):
    for kept in ranks(size, two_at_once):
        assert kept == [True] * 5


def random_sum(group, dtype):
    x = torch.randn(37, 1031, generator=torch.Generator().manual_seed(group.rank)).to(dtype)
    return all_reduce(x.clone(), group), all_reduce(x.clone(), group)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_rank_gets_the_same_bits_and_so_does_a_second_call(ranks, size, dtype):
    found = ranks(size, random_sum, dtype)
    assert all(torch.equal(result, found[0][0]) for pair in found for result in pair)


def largest_of(group):
    x = per_rank((4, 6), group.size, 1)[group.rank]
    before = x.clone()
    found = [exchange.largest(value, group) for value in (x, x.t(), x[:, :3], x[::2])]
    return torch.equal(x, before), found


@pytest.mark.parametrize("size", SIZES)
def test_largest_is_a_new_tensor(ranks, size):
    wanted = torch.stack(per_rank((4, 6), size, 1)).amax(0)
    for unchanged, found in ranks(size, largest_of):
        assert unchanged
        for got, value in zip(found, (wanted, wanted.t(), wanted[:, :3], wanted[::2]), strict=True):
            assert torch.equal(got, value)
