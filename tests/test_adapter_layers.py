"""A layer with low-rank adapters computes what the full layer with them fused does; in small integers, exactly."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from calls import Calls
from close import exactly, nearly, relative_error
from linears import KINDS, SIZES, WHOLE_OUTPUT, linear_for, part, sharded_linear
from seeded import integers, noise
from test_layers_uneven import cut
from tp_layers.group import Group
from tp_layers.layers.linear import ColwiseLinear, RowwiseLinear
from tp_layers.layers.low_rank import AdaptedLinear, LowRank, attach, detach
from tp_layers.layers.options import Options
from tp_layers.plans.spec import ShardSpec

EXACT = torch.float64
RANKS = {"rank_1": 1, "rank_5": 5, "rank_16": 16}
# Powers of two, so that every product is exact.
FACTORS = (0.5, -2.0)


def adapters_for(linear, r, dtype=EXACT, *, bias=True):
    """Two adapters, of ranks `r` and 3."""
    n, k = linear.weight.shape
    found = []
    for number, (rank, factor) in enumerate(zip((r, 3), FACTORS, strict=True)):
        tensors = [
            integers(*shape, seed=20 * number + i, most=2) for i, shape in enumerate(((rank, k), (n, rank), (n,)))
        ]
        down, up, added = (tensor.to(dtype) for tensor in tensors)
        found.append(LowRank(down, up, added if bias else None, scaling=factor * 4, scale=0.25))
    return found


def fuse(linear, adapters):
    """A copy of the full layer with the adapters in its parameters."""
    full = copy.deepcopy(linear)
    with torch.no_grad():
        for it, factor in zip(adapters, FACTORS, strict=False):
            full.weight += factor * it.up @ it.down
            full.bias += factor * it.bias
    return full


def with_adapters(layer, adapters):
    for number, it in enumerate(adapters):
        attach(layer, f"a{number}", it.shard(layer.spec, layer.group).like(layer.weight))
    return layer


def used(group, kind, r, uneven):
    """A layer's output, by another rank's bias alone, the gradient of its input, and its collectives."""
    linear = linear_for(kind, 12, EXACT, unit=1) if uneven else linear_for(kind, group.size, EXACT)
    layer = cut(kind, linear, group) if uneven else sharded_linear(kind, linear, group)
    layer.requires_grad_(False)
    with_adapters(layer, adapters_for(linear, r))
    x, grad = (integers(2, 3, width, seed=10, most=4, dtype=EXACT) for width in linear.weight.shape[::-1])
    split_in, split_out = layer.in_features < x.shape[-1], layer.out_features < grad.shape[-1]
    leaf = (layer.features.take(x, group.rank, group.size) if split_in else x).requires_grad_()
    with Calls() as calls, torch.no_grad():
        plain = layer(leaf)
    y = layer(leaf)
    y.backward(layer.features.take(grad, group.rank, group.size) if split_out else grad)
    return plain, y.detach(), leaf.grad, len(calls.names)


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
@pytest.mark.parametrize("r", RANKS.values(), ids=RANKS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_input_gradients_are_those_of_the_full_layer_with_the_adapters_fused(ranks, kind, r, uneven):
    for size in (3, 4) if uneven else SIZES:
        linear = linear_for(kind, 12, EXACT, unit=1) if uneven else linear_for(kind, size, EXACT)
        full = fuse(linear, adapters_for(linear, r))
        x, grad = (integers(2, 3, width, seed=10, most=4, dtype=EXACT) for width in linear.weight.shape[::-1])
        y = full(x.requires_grad_())
        y.backward(grad)
        for rank, (plain, output, x_grad, collectives) in enumerate(ranks(size, used, kind, r, uneven)):
            here = Group(rank, size)
            layer = cut(kind, linear, here) if uneven else sharded_linear(kind, linear, here)
            wanted, wanted_grad = y.detach(), x.grad
            if layer.out_features < y.shape[-1]:
                wanted = layer.features.take(wanted, rank, size)
            if layer.in_features < x.shape[-1]:
                wanted_grad = layer.features.take(wanted_grad, rank, size)
            assert torch.equal(output, wanted) and torch.equal(plain, wanted)
            assert torch.equal(x_grad, wanted_grad)
            assert collectives == (kind in WHOLE_OUTPUT and size > 1)


def test_granules_fewer_than_ranks_are_cut_as_the_weight_is():
    linear = nn.Linear(6, 20, dtype=EXACT)
    adapter = adapters_for(linear, 4)[0]
    spec = ShardSpec.of(0, 20, [12, 8], [12, 2])
    for rank in range(4):
        layer = ColwiseLinear(linear, spec, Group(rank, 4))
        held = adapter.shard(layer.spec, layer.group)
        assert torch.equal(held.up @ held.down, spec.take(adapter.up @ adapter.down, rank, 4))
        assert torch.equal(held.bias, spec.take(adapter.bias, rank, 4)) and torch.equal(held.down, adapter.down)


OPTIONS = {"in_place": Options(copy=False), "reduced_in_float64": Options(reduce_dtype=EXACT)}


def with_options(group, kind, options):
    linear = linear_for(kind, group.size)
    layer, blocks, own = KINDS[kind]
    made = layer.from_linear(linear, group=group, blocks=blocks, options=options, **own)
    with_adapters(made, adapters_for(linear, 4, torch.float32))
    x = part(kind, made.spec, integers(3, linear.in_features, seed=1, most=4), "input", group)
    with torch.no_grad():
        return made(x)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_full_weights_in_place_and_a_wider_reduction_take_adapters(ranks, kind, options):
    linear = linear_for(kind, 2)
    full = fuse(linear, adapters_for(linear, 4, torch.float32))
    with torch.no_grad():
        y = full(integers(3, linear.in_features, seed=1, most=4))
    for rank, got in enumerate(ranks(2, with_options, kind, options)):
        spec = sharded_linear(kind, linear, Group(rank, 2)).spec
        assert exactly(got, part(kind, spec, y, "output", Group(rank, 2)))


def several_inputs(group, linear, x):
    layer = with_adapters(RowwiseLinear.from_linear(linear, group=group, blocks=[1, 2]), adapters_for(linear, 4))
    mine = layer.features.take(x, group.rank, group.size)
    with torch.no_grad():
        return layer(mine.split([2, 1, 3], -1)), layer(mine.split([2, 4], -1))


def test_inputs_in_several_parts_meet_the_adapters_columns_in_turn(ranks):
    linear = linear_for("rowwise", 2, EXACT, unit=6)
    x = integers(3, 12, seed=1, most=4, dtype=EXACT)
    wanted = fuse(linear, adapters_for(linear, 4))(x).detach()
    for found in ranks(2, several_inputs, linear, x):
        assert all(exactly(y, wanted) for y in found)


def partial(group, linear, x):
    layer = RowwiseLinear.from_linear(linear, group=group, reduce=False)
    with torch.no_grad():
        return with_adapters(layer, adapters_for(linear, 4))(layer.features.take(x, group.rank, group.size))


def test_a_partial_sum_has_its_part_of_the_adapters_and_their_bias_once(ranks):
    linear = linear_for("rowwise", 3, EXACT)
    x = integers(4, linear.in_features, seed=1, most=4, dtype=EXACT)
    assert torch.equal(sum(ranks(3, partial, linear, x)), fuse(linear, adapters_for(linear, 4))(x).detach())


def test_a_whole_layer_has_its_keys_hooks_and_class_back_without_adapters():
    linear = nn.Linear(4, 6, dtype=EXACT)
    adapters = adapters_for(linear, 2)
    full, called = fuse(linear, adapters), []
    linear.register_forward_hook(lambda *_: called.append(1))
    x = integers(3, 4, dtype=EXACT)
    plain = linear(x)
    for number, it in enumerate(adapters):
        attach(linear, f"a{number}", it)
    assert isinstance(linear, AdaptedLinear) and list(linear.state_dict()) == ["weight", "bias"]
    assert relative_error(linear(x), full(x)) < 1e-15 and len(called) == 2
    detach(linear, "a0")
    detach(linear, "a1")
    assert type(linear) is nn.Linear and torch.equal(linear(x), plain) and not hasattr(linear, "adapters")


def test_adapters_follow_their_layer_and_are_copied_with_it():
    for layer in (ColwiseLinear.from_linear(nn.Linear(4, 6)), nn.Linear(4, 6)):
        attach(layer, "a", adapters_for(nn.Linear(4, 6), 2, torch.float32)[0])
        twin = copy.deepcopy(layer).to(torch.float64)
        assert {it.dtype for it in (twin.adapters["a"].down, twin.adapters["a"].up, twin.adapters["a"].bias)} == {EXACT}
        assert layer.adapters["a"].up.dtype == torch.float32
        assert twin.to("meta").adapters["a"].down.is_meta and not layer.adapters["a"].down.is_meta


def test_one_that_is_turned_off_changes_no_bit():
    layer = ColwiseLinear.from_linear(nn.Linear(4, 6))
    x = noise(3, 4)
    plain = layer(x)
    broken = LowRank(torch.full((2, 4), torch.nan), torch.zeros(6, 2), torch.full((6,), torch.nan), scaling=1.0)
    attach(layer, "a", replace(broken, scale=0.0))
    assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("shape", [(4,), (0, 4), (2, 0, 4), (2, 1, 3, 4)], ids=["one_row", "none", "no_rows", "4d"])
def test_inputs_of_any_number_of_dims(shape):
    for layer in (
        nn.Linear(4, 6),
        RowwiseLinear.from_linear(nn.Linear(4, 6)),
        ColwiseLinear.from_linear(nn.Linear(4, 6)),
    ):
        adapter = adapters_for(nn.Linear(4, 6), 2, torch.float32)[0]
        x = integers(*shape)
        with torch.no_grad():
            wanted = layer(x) + adapter.factor * (x @ adapter.down.T @ adapter.up.T + adapter.bias)
            attach(layer, "a", adapter)
            assert nearly(layer(x), wanted)
