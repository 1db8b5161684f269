"""What each collective returns and what its gradient is: the table of the module's docstring, in small integers."""

import pytest
import torch
from torch import nn

from calls import Calls
from seeded import integers, per_rank
from tp_layers import exchange
from tp_layers.collectives import all_gather, all_reduce, replicate, split
from tp_layers.gradients import sum_gradient
from tp_layers.plans.spec import ShardSpec

SIZES = [1, 2, 3, 4]
BLOCKS = {"one_block": (12,), "three_to_one": (36, 12), "grouped_qkv_and_gated_mlp": (24, 12, 12, 36, 36)}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


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
    x, grads = integers(3, 5, seed=1), per_rank((3, 5), group.size, 2)
    with torch.no_grad():
        same = replicate(x, group) is x
    return same, with_gradient(lambda t: replicate(t, group), x, grads[group.rank])


@pytest.mark.parametrize("size", SIZES)
def test_replicate_is_the_tensor_and_sums_its_gradient(ranks, size):
    for same, (result, grad) in ranks(size, replicated):
        assert same
        assert torch.equal(result, integers(3, 5, seed=1))
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
    return integers(*shape, seed=1), integers(*shape, seed=2)


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
        right["largest"] = exchange.largest(torch.zeros(0), group).shape == (0,)
    return right, calls.names


@pytest.mark.parametrize("size", SIZES)
def test_tensors_without_elements_pass_without_a_collective(ranks, size):
    for right, names in ranks(size, empty):
        assert all(right.values()), right
        assert names == []


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
