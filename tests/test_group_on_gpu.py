"""Collectives and layers over NCCL on one GPU, by a process that passes for a rank of two; each test on a CPU too."""

import pytest
import torch
from torch import nn

from alone import DEVICES, SIZE, WAYS, Doubled, half, one_rank
from seeded import integers
from tp_layers import RowwiseLinear
from tp_layers.collectives import _merge, all_reduce
from tp_layers.exchange import broadcast_text, gather_objects, largest
from tp_layers.group import Group
from tp_layers.in_order import sum_in_order
from tp_layers.layers.options import Options
from tp_layers.layers.overlap import Overlap
from tp_layers.plans.spec import ShardSpec
from tp_layers.rates import measure
from tp_layers.under_way import all_reduce_later, start_all_reduce

ROWS, WIDTH, DEPTH = 1100, 384, 512
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def world(request):
    """The process group of this process alone, on the device that is asked for."""
    with one_rank(request.param) as process_group:
        yield process_group


on_devices = pytest.mark.parametrize("world", DEVICES, indirect=True)
in_all_ways = pytest.mark.parametrize(("world", "backend"), WAYS, indirect=["world"])


def drawn(device, rows, width, seed):
    return integers(rows, width, seed=seed, most=1).to(device)


def linear(device, dtype=torch.float32):
    """Of -1, 0 and 1, as all inputs here: every part of a sum is exact in bfloat16, wherever it is cut or rounded."""
    made = nn.Linear(DEPTH, WIDTH, dtype=dtype)
    with torch.no_grad():
        made.weight.copy_(integers(WIDTH, DEPTH, seed=1, most=1))
        made.bias.copy_(integers(WIDTH, seed=2))
    return made.to(device)


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_collectives_of_one_rank(world, dtype):
    group, one = half(0, world), Group.of(world)
    x = integers(5, 12, seed=1, dtype=dtype).to(one.device)
    reduced = x.clone()
    assert all_reduce(reduced, group) is reduced and torch.equal(reduced, x)
    assert torch.equal(start_all_reduce(x.clone(), group)(), x)
    assert torch.equal(all_reduce_later(x.clone(), group) + 0, x)
    assert torch.equal(largest(x, group), x)
    # Over two ranks these would take the other's part.
    assert one.size == 1 and torch.equal(sum_in_order(x.clone(), one), x)
    spec = ShardSpec(-1, (8, 4))
    assert torch.equal(_merge(spec.take(x, 0, 1), one, spec), x)
    assert gather_objects({"dtype": str(dtype)}, one) == [{"dtype": str(dtype)}]
    assert broadcast_text("text", one) == "text"


@on_devices
def test_sums_that_are_launched_count_each_rank_once(world):
    group = half(1, world)
    x = integers(5, 12, seed=1).to(group.device)
    with Doubled() as sums:
        assert torch.equal(all_reduce(x.clone(), group), 2 * x)
        assert torch.equal(start_all_reduce(x.clone(), group)(), 2 * x)
    assert sums.calls == ["waited for", "started"]


def partial_sum(layer, full, x):
    """What the layer's rank adds, by torch on its own columns; the bias on the first rank alone."""
    rank = layer.group.rank
    y = layer.features.take(x, rank, SIZE) @ layer.spec.take(full.weight, rank, SIZE).t()
    return y + full.bias if rank == 0 else y


@in_all_ways
@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("wide", [None, torch.float32], ids=["own dtype", "in float32"])
def test_chunks_are_the_whole_bit_for_bit_and_each_is_reduced_once(world, backend, dtype, wide, rank):
    group, options = half(rank, world), Options(backend=backend, reduce_dtype=wide)
    full, x = linear(group.device), drawn(group.device, ROWS, DEPTH, 3)
    layer = RowwiseLinear.from_linear(linear(group.device, dtype), group=group, options=options)
    found = []
    with torch.no_grad():
        for overlap, calls in ((None, ["waited for"]), (Overlap(4), ["started"] * 4)):
            layer.overlap = overlap
            with Doubled() as sums:
                found.append(layer(layer.features.take(x, rank, SIZE).to(dtype)))
            assert sums.calls == calls
        whole, chunked = found
        assert torch.equal(chunked, whole) and torch.equal(whole, (2 * partial_sum(layer, full, x)).to(dtype))


@in_all_ways
@pytest.mark.parametrize("overlap", [None, Overlap(4), Overlap(1, later=True)], ids=["whole", "chunks", "put off"])
def test_two_halves_are_the_full_layer_and_earlier_results_stay(world, backend, overlap):
    device, halves = half(0, world).device, []
    full, inputs = linear(device), [drawn(device, ROWS, DEPTH, seed) for seed in (3, 4, 5)]
    with torch.no_grad():
        for rank in range(SIZE):
            how = dict(group=half(rank, world), blocks=[1, 3], options=Options(backend=backend))
            layer = RowwiseLinear.from_linear(full, **how)
            layer.overlap = overlap
            parts = [layer.features.take(x, rank, SIZE) for x in inputs]
            # Two inputs of one product, which is how attention and MLP come to one layer.
            halves.append([layer(part.split([DEPTH // 8, 3 * DEPTH // 8], -1)) for part in parts])
        for x, first, second in zip(inputs, *halves, strict=True):
            assert torch.equal(first + second, full(x))


@on_devices
def test_rates_are_measured(world):
    found = measure(half(0, world), torch.float32, width=64, rows=32, rounds=2)
    assert min(found.flops, found.latency, found.transfer, found.weights) > 0


@on_devices
@pytest.mark.parametrize("rank", range(SIZE))
def test_a_gradient_is_that_of_the_full_layer(world, rank):
    group = half(rank, world)
    full, x = linear(group.device), drawn(group.device, ROWS, DEPTH, 3)
    layer = RowwiseLinear.from_linear(linear(group.device), group=group)
    for module, given in ((full, x), (layer, layer.features.take(x, rank, SIZE))):
        module(given).backward(drawn(group.device, ROWS, WIDTH, 4))
    assert torch.equal(layer.weight.grad, layer.spec.take(full.weight.grad, rank, SIZE))
    assert torch.equal(layer.bias.grad, full.bias.grad)


def graphs(block, inputs, **how):
    """How many graphs torch.compile makes of one block for all of the inputs, and whether each result is eager's."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, fullgraph=True, backend=counter, **how)
    same = [torch.equal(compiled(x), block(x)) for x in inputs]
    return counter.frame_count, same


@in_all_ways
def test_another_number_of_rows_is_no_other_graph(world, backend):
    group = half(0, world)
    how = dict(group=group, split_input=True, options=Options(backend=backend))
    layer = RowwiseLinear.from_linear(linear(group.device), **how)
    inputs = [drawn(group.device, rows, DEPTH, rows) for rows in (ROWS, 1000, 640, 129, 17)]
    with torch.no_grad():
        assert graphs(layer, inputs, dynamic=True) == (1, [True] * 5)
        # The first graph is of one number of rows, the second of any.
        assert graphs(layer, inputs) == (2, [True] * 5)
