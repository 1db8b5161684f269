"""Layers and collectives whose ranks hold unequal numbers of whole granules, in small integers: every sum is exact."""

from functools import partial

import pytest
import torch
from torch import nn

from close import nearly
from convs import CHANNELS, CONVS, inputs
from linears import KINDS, linear_for
from norms import NORMS, norm_for, whole
from seeded import integers, noise
from test_collectives import with_gradient
from tp_layers.collectives import all_gather, split
from tp_layers.group import Group
from tp_layers.layers.conv import ColwiseConv, RowwiseConv
from tp_layers.layers.embedding import VocabParallelEmbedding
from tp_layers.layers.linear import ColwiseLinear, RowwiseLinear
from tp_layers.layers.norm import AcrossRMSNorm
from tp_layers.layers.options import Options
from tp_layers.plans.spec import ShardSpec

SIZES = [2, 3, 4]
EXACT = torch.float64
# Of as many blocks as a kind of layer has, each of twelve rows times its proportion; no size divides all of them.
GRANULES = {1: (6,), 2: (6, 4), 5: (6, 6, 4, 6, 9)}


def cut(kind, linear, group, **options):
    layer, blocks, own = KINDS[kind]
    granules = GRANULES[len(blocks or [1])]
    return layer.from_linear(linear, group=group, blocks=blocks, granules=granules, **own, **options)


def used(group, kind):
    """A layer's local widths, its output with full weights in place, and the output and gradients with shards."""
    linear = linear_for(kind, 12, EXACT, unit=1, other=7)
    layer, in_place = cut(kind, linear, group), cut(kind, linear, group, options=Options(copy=False))
    x, grad = (integers(5, width, seed=10, most=4, dtype=EXACT) for width in linear.weight.shape[::-1])
    split_in, split_out = layer.in_features < x.shape[-1], layer.out_features < grad.shape[-1]
    leaf = (layer.features.take(x, group.rank, group.size) if split_in else x).requires_grad_()
    layer.zero_grad()
    with torch.no_grad():
        plain = in_place(leaf)
    y = layer(leaf)
    y.backward(layer.features.take(grad, group.rank, group.size) if split_out else grad)
    grads = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return layer.local, plain, y.detach(), leaf.grad, grads


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_gradients_are_those_of_the_full_layer(ranks, size, kind):
    linear = linear_for(kind, 12, EXACT, unit=1, other=7)
    x, grad = (integers(5, width, seed=10, most=4, dtype=EXACT) for width in linear.weight.shape[::-1])
    x.requires_grad_()
    y = linear(x)
    y.backward(grad)
    found = ranks(size, used, kind)
    widths = [width for width, *_ in found]
    assert len(set(widths)) > 1 or size != 4
    for rank, (width, plain, output, x_grad, grads) in enumerate(found):
        layer = cut(kind, linear, Group(rank, size))
        split_in, split_out = layer.in_features < x.shape[-1], layer.out_features < y.shape[-1]
        assert width == layer.spec.extent(rank, size) == layer.weight.shape[layer.spec.dim]

        def part(full, of, features=layer.features, rank=rank):
            return features.take(full, rank, size) if of else full

        assert torch.equal(output, part(y.detach(), split_out)) and torch.equal(plain, output)
        assert torch.equal(x_grad, part(x.grad, split_in))
        assert torch.equal(grads["weight"], layer.spec.take(linear.weight.grad, rank, size))
        bias = linear.bias.grad
        assert torch.equal(
            grads["bias"], bias if isinstance(layer, RowwiseLinear) else layer.spec.take(bias, rank, size)
        )


CUTS = {"heads": ((12,), (6,)), "heads and an MLP": ((18, 8), (6, 4)), "fewer than ranks": ((12, 8), (12, 2))}


def gathered(group, blocks, granules, dim):
    spec = ShardSpec(dim, blocks, granules)
    shape = [2, 3, 2]
    shape[dim] = spec.length
    full, grad = integers(*shape, seed=1), integers(*shape, seed=2)
    shard = spec.take(full, group.rank, group.size)
    result, shard_grad = with_gradient(lambda t: all_gather(t, group, spec), shard, grad)
    right = torch.equal(result, full) and torch.equal(shard_grad, spec.take(grad, group.rank, group.size))
    if spec.copies(group.size) > 1:
        with pytest.raises(ValueError, match=r"^\[12, 8\] in \[12, 2\] granules over 4 ranks: 2 of them would hold"):
            split(full, group, spec)
        return right
    part, full_grad = with_gradient(lambda t: split(t, group, spec), full, spec.take(grad, group.rank, group.size))
    return right and torch.equal(part, shard) and torch.equal(full_grad, grad)


@pytest.mark.parametrize("dim", [0, 1, -1], ids=["first_dim", "middle_dim", "last_dim"])
@pytest.mark.parametrize(("blocks", "granules"), CUTS.values(), ids=CUTS)
def test_all_gather_and_split_are_each_other_s_duals(ranks, blocks, granules, dim):
    for size in (2, 4):
        assert ranks(size, gathered, blocks, granules, dim) == [True] * size


@pytest.mark.parametrize(
    "make",
    [
        partial(RowwiseLinear.from_linear, nn.Linear(12, 4)),
        partial(RowwiseConv.from_conv, nn.Conv1d(12, 4, 1)),
        partial(VocabParallelEmbedding.from_embedding, nn.Embedding(12, 4)),
    ],
    ids=["linear", "conv", "embedding"],
)
def test_no_layer_sums_what_several_ranks_hold(make):
    make(group=Group(0, 2), granules=[2])
    with pytest.raises(ValueError, match=r"^\[12\] in \[2\] granules over 4 ranks: 2 of them would hold and sum"):
        make(group=Group(0, 4), granules=[2])


def test_a_colwise_layer_may_hold_what_others_hold():
    assert ColwiseLinear.from_linear(nn.Linear(4, 12), group=Group(3, 4), granules=[2]).out_features == 6


def normed(group, name, granules):
    norm, x = norm_for(name), noise(4, 6, 228)
    layer = AcrossRMSNorm.from_norm(norm, group=group, granules=granules)
    wanted = layer.spec.take(whole(norm, x).movedim(-1, 0), group.rank, group.size).movedim(0, -1)
    local = layer.spec.take(x.movedim(-1, 0), group.rank, group.size).movedim(0, -1)
    with torch.no_grad():
        return nearly(layer(local), wanted), local.shape[-1]


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_across_unequal_or_shared_parts_is_that_of_the_full_width(ranks, name):
    assert ranks(4, normed, name, [6]) == [(True, 76), (True, 76), (True, 38), (True, 38)]
    # Each half of the channels is in the sum of squares twice.
    assert ranks(4, normed, name, [2]) == [(True, 114)] * 4
    assert ranks(3, normed, name, [1]) == [(True, 228)] * 3


def in_memory(group, extents, order):
    """The strides of outputs: of three channels given, then of three taken, two on one rank and one on the other."""
    gives, takes = (CONVS[extents](*it, 3, padding=1) for it in ((CHANNELS, 3), (3, CHANNELS)))
    x = inputs(extents, order).float()
    gathered = ColwiseConv.from_conv(gives, group=group, granules=[3], gather=True)(x)
    adds = RowwiseConv.from_conv(takes, group=group, granules=[3])
    added = adds(adds.features.view(gives(x), group.rank, group.size))
    return gathered.stride(), added.stride()


@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
@pytest.mark.parametrize("extents", [1, 2, 3], ids=["1d", "2d", "3d"])
def test_a_rank_of_one_channel_has_the_order_of_memory_of_the_others(ranks, extents, order):
    gives, takes = (CONVS[extents](*it, 3, padding=1) for it in ((CHANNELS, 3), (3, CHANNELS)))
    y = gives(inputs(extents, order).float())
    assert ranks(2, in_memory, extents, order) == [(y.stride(), takes(y).stride())] * 2
