"""The collectives: the table of the module's docstring with small integers (exactly equal), and what each refuses."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tp_layers import collectives
from tp_layers.collectives import all_gather, all_reduce, replicate, split, sum_gradient
from tp_layers.group import Group
from tp_layers.plans.spec import ShardSpec

SIZES = [1, 2, 3, 4]
BLOCKS = {"one_block": (12,), "three_to_one": (36, 12), "grouped_qkv_and_gated_mlp": (24, 12, 12, 36, 36)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Calls(TorchDispatchMode):
    """Names every collective that runs within: `with Calls() as calls: ...`, then `calls.names`."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def integers(shape, seed, dtype=torch.float32):
    """Small integers, whose sums no dtype rounds."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_rank(shape, size, seed, dtype=torch.float32):
    """What each rank puts in, in rank order."""
    return [integers(shape, 100 * seed + rank, dtype) for rank in range(size)]


def with_gradient(function, x, grad):
    """The result of `function(x)`, and the gradient of `x` for `grad` at the result; `grad` must be left as it was."""
    leaf, kept = x.clone().requires_grad_(), grad.clone()
    # Times one: an in-place collective may not be done on a leaf.
    result = function(leaf * 1)
    result.backward(grad)
    assert torch.equal(grad, kept), "the incoming gradient was overwritten"
    return result.detach(), leaf.grad


def reduced(group, dtype):
    x, grads = (per_rank((3, 5), group.size, seed, dtype) for seed in (1, 2))
    in_place = x[group.rank].clone()
    result = all_reduce(in_place, group)
    with_graph = x[group.rank].clone().requires_grad_() * 1
    same = result is in_place and all_reduce(with_graph, group).data_ptr() == with_graph.data_ptr()
    whole = with_gradient(lambda t: all_reduce(t, group), x[group.rank], grads[group.rank])
    named = with_gradient(lambda t: all_reduce(t, group, "whole"), x[group.rank], grads[group.rank])
    divided = with_gradient(lambda t: all_reduce(t, group, consumer="split"), x[group.rank], grads[group.rank])
    return same, result, whole, named, divided


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("size", SIZES)
def test_all_reduce_sums_in_place_and_its_dual_is_chosen_by_the_consumer(ranks, size, dtype):
    x, grads = (per_rank((3, 5), size, seed, dtype) for seed in (1, 2))
    for rank, (same, result, whole, named, divided) in enumerate(ranks(size, reduced, dtype)):
        assert same
        for got in (result, whole[0], named[0], divided[0]):
            assert torch.equal(got, sum(x))
        assert torch.equal(whole[1], grads[rank]) and torch.equal(named[1], grads[rank])
        assert torch.equal(divided[1], sum(grads))


def replicated(group):
    x, grads = integers((3, 5), 1), per_rank((3, 5), group.size, 2)
    with torch.no_grad():
        same = replicate(x, group) is x
    return same, with_gradient(lambda t: replicate(t, group), x, grads[group.rank])


@pytest.mark.parametrize("size", SIZES)
def test_replicate_is_the_tensor_and_sums_its_gradient(ranks, size):
    for same, (result, grad) in ranks(size, replicated):
        assert same
        assert torch.equal(result, integers((3, 5), 1))
        assert torch.equal(grad, sum(per_rank((3, 5), size, 2)))


def gathered(group, blocks, dim):
    spec = ShardSpec(dim, blocks)
    full, grad = whole_pair(blocks, dim)
    shard = spec.take(full, group.rank, group.size)
    with torch.no_grad():
        plain = all_gather(shard, group, spec)
    return plain, with_gradient(lambda t: all_gather(t, group, spec), shard, grad)


def whole_pair(blocks, dim):
    """A full tensor whose `dim` is made of `blocks`, and another as its gradient; the same on every rank."""
    shape = [2, 3, 2]
    shape[dim] = sum(blocks)
    return integers(shape, 1), integers(shape, 2)


@pytest.mark.parametrize("dim", [0, 1, -1], ids=["first_dim", "middle_dim", "last_dim"])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_all_gather_merges_and_its_dual_takes_the_own_shard(ranks, size, blocks, dim):
    full, grad = whole_pair(blocks, dim)
    for rank, (plain, (result, shard_grad)) in enumerate(ranks(size, gathered, blocks, dim)):
        assert torch.equal(plain, full) and torch.equal(result, full)
        assert torch.equal(shard_grad, ShardSpec(dim, blocks).take(grad, rank, size))


def divided(group, blocks, dim):
    spec = ShardSpec(dim, blocks)
    full, grad = whole_pair(blocks, dim)
    with torch.no_grad():
        plain = split(full, group, spec)
    return plain.clone(), with_gradient(lambda t: split(t, group, spec), full, spec.take(grad, group.rank, group.size))


@pytest.mark.parametrize("dim", [0, 1, -1], ids=["first_dim", "middle_dim", "last_dim"])
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("size", SIZES)
def test_split_takes_the_own_shard_and_its_dual_merges(ranks, size, blocks, dim):
    spec, (full, grad) = ShardSpec(dim, blocks), whole_pair(blocks, dim)
    for rank, (plain, (result, full_grad)) in enumerate(ranks(size, divided, blocks, dim)):
        assert torch.equal(plain, spec.take(full, rank, size)) and torch.equal(result, plain)
        assert torch.equal(full_grad, grad)


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
    full = integers((5, 12 * group.size), 3)
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
    base = integers((4, 6), group.rank)
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


def empty(group):
    """Whether results and gradients of tensors without elements have the right shapes, and the collectives made."""
    spec = ShardSpec(-1, (3 * group.size, group.size))
    cases = {
        "all_reduce": (lambda t: all_reduce(t, group), (0, 4), (0, 4)),
        "all_reduce_split": (lambda t: all_reduce(t, group, consumer="split"), (2, 0, 4), (2, 0, 4)),
        "replicate": (lambda t: replicate(t, group), (0, 4), (0, 4)),
        "all_gather": (lambda t: all_gather(t, group, spec), (0, 4), (0, 4 * group.size)),
        "split": (lambda t: split(t, group, spec), (2, 0, 4 * group.size), (2, 0, 4)),
    }
    right = {}
    with Calls() as calls:
        for name, (function, shape, wanted) in cases.items():
            result, grad = with_gradient(function, torch.zeros(shape), torch.zeros(wanted))
            right[name] = tuple(result.shape) == wanted and tuple(grad.shape) == shape
        right["largest"] = collectives.largest(torch.zeros(0), group).shape == (0,)
    return right, calls.names


@pytest.mark.parametrize("size", SIZES)
def test_tensors_without_elements_pass_without_a_collective(ranks, size):
    for right, names in ranks(size, empty):
        assert all(right.values()), right
        assert names == []


def alone(group):
    """At size 1: whether each function returns its argument, and the collectives that ran."""
    x, spec = integers((3, 4), 1), ShardSpec(-1, (3, 1))
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
        largest = collectives.largest(x, group)
        text = collectives.broadcast_text("a text", group)
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


def two_at_once(group):
    """Whether the first of two results of each function has its values when the second is there."""
    spec = ShardSpec(-1, (12,))
    kept = []
    for function, shape in (
        (lambda t: all_reduce(t, group), (2, 12)),
        (lambda t: all_gather(t, group, spec), (2, 12 // group.size)),
        (lambda t: split(t, group, spec), (2, 12)),
        (lambda t: replicate(t, group), (2, 12)),
        (lambda t: collectives.largest(t, group), (2, 12)),
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


def head_gradients(group, thaw):
    """A parameter of every rank's own heads: its gradient after one and after two backward calls."""
    scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]), requires_grad=not thaw)
    sum_gradient(scale, group)
    asked = scale.requires_grad
    scale.requires_grad_(True)
    found = []
    for x in per_rank((4, 3), group.size, 1)[group.rank], per_rank((4, 3), group.size, 2)[group.rank]:
        (scale * x).sum().backward()
        found.append(scale.grad.clone())
    return asked, scale.detach(), found


@pytest.mark.parametrize("thaw", [False, True], ids=["trainable", "frozen_then_thawed"])
@pytest.mark.parametrize("size", SIZES)
def test_sum_gradient_gives_the_gradient_of_all_heads_in_every_backward_call(ranks, size, thaw):
    once = sum(per_rank((4, 3), size, 1)).sum(0)
    twice = once + sum(per_rank((4, 3), size, 2)).sum(0)
    for asked, value, found in ranks(size, head_gradients, thaw):
        assert asked is not thaw
        assert value.tolist() == [1.0, 2.0, 3.0]
        assert torch.equal(found[0], once) and torch.equal(found[1], twice)


def frozen_head(group):
    scale = nn.Parameter(torch.ones(3), requires_grad=False)
    sum_gradient(scale, group)
    x = torch.ones(2, 3, requires_grad=True)
    with Calls() as calls:
        (scale * x).sum().backward()
    return scale.grad, calls.names


@pytest.mark.parametrize("size", SIZES)
def test_sum_gradient_leaves_a_frozen_parameter_alone(ranks, size):
    assert ranks(size, frozen_head) == [(None, [])] * size


def largest_of(group):
    x = per_rank((4, 6), group.size, 1)[group.rank]
    before = x.clone()
    found = [collectives.largest(value, group) for value in (x, x.t(), x[:, :3], x[::2])]
    return torch.equal(x, before), found


@pytest.mark.parametrize("size", SIZES)
def test_largest_is_a_new_tensor(ranks, size):
    wanted = torch.stack(per_rank((4, 6), size, 1)).amax(0)
    for unchanged, found in ranks(size, largest_of):
        assert unchanged
        for got, value in zip(found, (wanted, wanted.t(), wanted[:, :3], wanted[::2]), strict=True):
            assert torch.equal(got, value)


def passed_around(group):
    """A tensor handed to the next rank, and rank 0's text, over ranks 1 and 3 of the world and over all of them."""
    some = dist.new_group([1, 3])
    groups = [group] if group.rank % 2 == 0 else [group, Group.of(some)]
    found = []
    for over in groups:
        # A column view: what is sent need not be contiguous.
        mine, got = integers((3, 6), 10 + over.rank)[:, 1:4], torch.empty(3, 3)
        for sender in range(over.size):
            to = (sender + 1) % over.size
            if over.rank == sender:
                collectives.send(mine, over, to)
            if over.rank == to:
                filled = collectives.receive(got, over, sender)
        text = collectives.broadcast_text(f"text of world rank {group.rank}", over)
        found.append((over.rank, over.size, filled is got, got, text))
    return found


def test_tensors_and_texts_go_by_ranks_of_the_group(ranks):
    found = ranks(4, passed_around)
    assert [len(over) for over in found] == [1, 2, 1, 2]
    for over in found:
        for (rank, size, same, got, text), first in zip(over, (0, 1), strict=False):
            assert same
            assert torch.equal(got, integers((3, 6), 10 + (rank - 1) % size)[:, 1:4])
            assert text == f"text of world rank {first}"
