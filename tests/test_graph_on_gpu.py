"""A sharded block as a CUDA graph: 100 replays with changing inputs give eager's bits. On a CPU nothing is captured."""

import pytest
import torch
from torch import nn

from alone import DEVICES, WAYS, Doubled, captured, forget_graphs, half, one_rank
from close import randomise
from seeded import noise
from tp_layers import AcrossRMSNorm, ColwiseLinear, RowwiseLinear
from tp_layers.group import Group
from tp_layers.in_order import sum_in_order
from tp_layers.inputs import check_first_inputs
from tp_layers.layers.options import Options
from tp_layers.layers.overlap import Overlap

WIDTH, INNER, ROWS, REPLAYS = 256, 512, 96, 100


@pytest.fixture(scope="module")
def shared(request):
    """The process group of this process alone, on the device that is asked for."""
    with one_rank(request.param) as process_group:
        yield process_group


@pytest.fixture
def world(shared):
    yield shared
    forget_graphs()


on_devices = pytest.mark.parametrize("shared", DEVICES, indirect=True)
in_all_ways = pytest.mark.parametrize(("shared", "backend"), WAYS, indirect=["shared"])


class Block(nn.Module):
    """A gated MLP with a norm across ranks, and a residual stream: every collective that a block of a model has."""

    def __init__(self, group, backend="torch", overlap=None):
        super().__init__()
        options = Options(backend=backend)
        full = nn.Sequential(nn.Linear(WIDTH, 2 * INNER), nn.RMSNorm(INNER, eps=1e-6), nn.Linear(2 * INNER, WIDTH))
        randomise(full.to(group.device))
        self.up = ColwiseLinear.from_linear(full[0], group=group, blocks=[1, 1], options=options)
        self.norm = AcrossRMSNorm.from_norm(full[1], group=group, options=options)
        self.down = RowwiseLinear.from_linear(full[2], group=group, blocks=[1, 1], options=options)
        self.down.overlap = overlap

    def forward(self, x):
        gate, up = self.up(x).chunk(2, -1)
        return x + self.down((nn.functional.silu(gate) * up, self.norm(up)))


def inputs(group, count=REPLAYS):
    return [noise(ROWS, WIDTH, seed=seed, dtype=torch.float32).to(group.device) for seed in range(count)]


@on_devices
def test_the_block_has_all_of_it(world):
    with torch.no_grad(), Doubled() as sums:
        group = half(0, world)
        Block(group, overlap=Overlap(4))(*inputs(group, 1))
        assert sums.calls == ["waited for"] + 4 * ["started"]


OVERLAPS = {"whole": None, "in chunks": Overlap(4), "put off": Overlap(1, later=True)}


@in_all_ways
@pytest.mark.parametrize("overlap", OVERLAPS.values(), ids=OVERLAPS)
def test_replays_are_eager_bit_for_bit(world, backend, overlap):
    with torch.no_grad():
        group = half(0, world)
        block, given = Block(group, backend, overlap), inputs(group)
        eager = [block(x) for x in given]
        replay = captured(block, given[0])
        assert [torch.equal(replay(x), y) for x, y in zip(given, eager, strict=True)] == [True] * REPLAYS


@on_devices
@pytest.mark.parametrize("overlap", [None, Overlap(4)], ids=["whole", "in chunks"])
def test_so_they_are_with_a_reduction_that_is_launched(world, overlap):
    with torch.no_grad(), Doubled():
        group = half(0, world)
        block, given = Block(group, overlap=overlap), inputs(group)
        eager = [block(x) for x in given]
        replay = captured(block, given[0])
        assert [torch.equal(replay(x), y) for x, y in zip(given, eager, strict=True)] == [True] * REPLAYS


@on_devices
def test_sums_in_rank_order_are_captured_too(world):
    one = Group.of(world)
    given = inputs(one)
    replay = captured(lambda x: sum_in_order(x.clone(), one) * 2, given[0])
    assert all(torch.equal(replay(x), 2 * x) for x in given)


@on_devices
def test_new_weights_in_the_same_memory_are_seen_by_the_next_replay(world):
    with torch.no_grad():
        group = half(0, world)
        block, (x,) = Block(group), inputs(group, 1)
        replay = captured(block, x)
        before = replay(x)
        for parameter in block.parameters():
            parameter.mul_(-1.5)
        assert torch.equal(replay(x), block(x)) and not torch.equal(replay(x), before)


@on_devices
def test_first_inputs_are_compared_before_a_capture_and_not_in_it(world):
    with torch.no_grad():
        group = half(0, world)
        block, (x,) = Block(group), inputs(group, 1)
        check_first_inputs(block, group)
        y = captured(block, x)(x)
        assert torch.equal(block(x), y) and not block._forward_pre_hooks
