"""Sums in symmetric memory and outputs in registered memory, on one GPU by a process that passes for a rank of two.

On a CPU both are faked, which shows the tests themselves to be right. A way that the machine has not is skipped, with
what torch or NCCL say.
"""

import contextlib
import gc
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn

from alone import DEVICES, Doubled, captured, forget_graphs, half, one_rank
from fake_ways import GPU, FakeWays
from seeded import integers
from tp_layers import RowwiseLinear, symmetric, ways, windows
from tp_layers.collectives import all_reduce
from tp_layers.layers.overlap import Overlap

LAST = 1 << 22
DTYPES = [torch.float32, torch.bfloat16]
on_devices = pytest.mark.parametrize("world", DEVICES, indirect=True)


@pytest.fixture
def world(request):
    """A process group of its own: what its ranks can do is asked once."""
    with one_rank(request.param) as process_group:
        yield process_group


@contextlib.contextmanager
def window(group, way, dtype=torch.float32):
    """One way for all messages; skips the test where this machine has not got it."""
    name = ways.machine(group.device) or GPU
    table = {(name, group.size, str(dtype).removeprefix("torch.")): ((16, LAST, way),)}
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    with contextlib.ExitStack() as stack:
        if group.device.type == "cpu":
            stack.enter_context(FakeWays(table))
        else:
            stack.enter_context(pytest.MonkeyPatch.context()).setattr(windows, "WINDOWS", table)
        ways.logger.addHandler(handler)
        stack.callback(ways.logger.removeHandler, handler)
        with torch.inference_mode():
            # What is made in the first call serves calls in other modes.
            found = ways.ways_of(group.device, group)
        if found.way(dtype, LAST) is None:
            # What torch does not let one rank have on a GPU; nothing is missing from what stands in for it on a CPU.
            assert group.device.type != "cpu", lines
            pytest.skip("; ".join(lines))
        yield found


def layer_of(group):
    full = nn.Linear(64, 256)
    with torch.no_grad():
        full.weight.copy_(integers(256, 64, seed=1, most=1))
        full.bias.copy_(integers(256, seed=2))
    full.to(group.device)
    return full, RowwiseLinear.from_linear(full, group=group)


def segments(pool):
    """Address and length of what a pool has."""
    return sorted((segment["address"], segment["total_size"]) for segment in pool.snapshot())


# Before the sums in symmetric memory: one that fails on a device takes the rest of the process along.
@on_devices
@pytest.mark.parametrize("overlap", [None, Overlap(4)], ids=["whole", "chunks"])
def test_outputs_are_in_registered_memory_and_right_and_stay(world, overlap):
    first, second = half(0, world), half(1, world)
    inputs = [integers(1024, 64, seed=seed, most=1).to(first.device) for seed in (3, 4, 5)]
    with torch.no_grad(), window(first, "registered") as found:
        outputs = []
        for group in (first, second):
            full, layer = layer_of(group)
            layer.overlap = overlap
            with Doubled() as sums:
                outputs.append([layer(layer.features.take(x, group.rank, group.size)) for x in inputs])
            assert len(sums.calls) == 3 * (4 if overlap else 1)
        for x, one, other in zip(inputs, *outputs, strict=True):
            assert torch.equal(one + other, 2 * full(x))
        if first.device.type == "cuda" and overlap is None:
            # Of chunks what is reduced lies there, and not what they are put together in.
            taken = segments(found.pool.pool)
            for y in outputs[0] + outputs[1]:
                assert any(start <= y.data_ptr() < start + length for start, length in taken)
            assert not any(start <= full.weight.data_ptr() < start + length for start, length in taken)
            # Memory of one that is let go is handed out again; of the first, which no name still holds.
            outputs[0].pop(0)
            torch.cuda.synchronize()
            again = found.pool.empty((1024, 256), torch.float32)
            assert any(start <= again.data_ptr() < start + length for start, length in taken)
            assert segments(found.pool.pool) == taken


@on_devices
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("way", symmetric.SUMS)
def test_a_sum_in_symmetric_memory_of_one_rank_is_its_own(world, way, dtype):
    group = half(0, world)
    with window(group, way, dtype), torch.no_grad():
        for seed, length in enumerate((8, 24, 1000, 4096, LAST // 4, 16)):
            x = integers(length, seed=seed, dtype=dtype).to(group.device)
            memory = torch.full((length + 3,), -1.0, dtype=dtype, device=group.device)
            # Where no vector may be loaded from.
            odd = memory[1 : length + 1]
            odd.copy_(x)
            for given in (x.clone(), odd):
                address = given.data_ptr()
                assert ways.summed(given, group) and torch.equal(given, x) and given.data_ptr() == address
            assert memory[0] == memory[-2] == memory[-1] == -1


@on_devices
@pytest.mark.parametrize("way", symmetric.SUMS)
def test_two_sums_are_alive_and_streams_take_turns(world, way):
    group = half(0, world)
    given = [integers(LAST // 4, seed=seed).to(group.device) for seed in range(6)]
    with window(group, way), torch.inference_mode():
        found = []
        for index, x in enumerate(given):
            stream = torch.cuda.Stream() if group.device.type == "cuda" and index % 2 else None
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = x.clone()
                assert ways.summed(y, group)
                found.append(y)
            if stream is not None:
                torch.cuda.current_stream().wait_stream(stream)
        assert all(torch.equal(x, y) for x, y in zip(given, found, strict=True))


@on_devices
@pytest.mark.parametrize("way", symmetric.SUMS)
def test_a_graph_takes_nccls_own(world, way):
    group = half(0, world)
    x = integers(64, 64, seed=1).to(group.device)
    with window(group, way) as found, Doubled() as sums:
        run = captured(lambda x: all_reduce(x.clone(), group), x)
        before = found.staging.stream
        for seed in range(5):
            other = integers(64, 64, seed=seed).to(group.device)
            wanted = 2 * other if group.device.type == "cuda" else other
            assert torch.equal(run(other), wanted)
        assert found.staging.stream == before
        assert (group.device.type == "cuda") == bool(sums.calls)
        forget_graphs()


def test_what_is_known_of_a_group_ends_with_it():
    with one_rank("cpu") as process_group, FakeWays({(GPU, 2, "float32"): ((16, 64, "one_shot"),)}):
        known = ways._KNOWN
        assert ways.summed(torch.ones(16), half(0, process_group)) and len(known) == 1
        del process_group
    assert not dist.is_initialized()
    gc.collect()
    assert len(known) == 0
