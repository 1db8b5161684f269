"""Chunked and put-off reductions: the same bits as the whole."""

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_layers
from close import FLOAT32, compare
from families import FAMILIES, digest, run
from seeded import integers
from tp_layers import RowwiseLinear, collectives, exchange
from tp_layers.group import Group
from tp_layers.layers.options import Options
from tp_layers.layers.overlap import Overlap
from tp_layers.rates import Rates

FLUX = FAMILIES["FluxTransformer2DModel"]


def linear(width: int = 24) -> nn.Linear:
    made = nn.Linear(width, 7)
    with torch.no_grad():
        made.weight.copy_(integers(7, width, seed=1))
        made.bias.copy_(integers(7, seed=2))
    return made


class Started(Counter[str]):
    """Counts the all-reduces that were started, and those that were waited for at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        super().__init__()
        original, run_to_its_end = dist.all_reduce, collectives.run

        def all_reduce(*args: Any, **how: Any) -> Any:
            self["started"] += 1
            return original(*args, **how)

        def at_once(*args: Any, **how: Any) -> None:
            before = self["started"]
            run_to_its_end(*args, **how)
            self["waited for"] += self["started"] - before
            self["started"] = before

        patch.setattr(dist, "all_reduce", all_reduce)
        for module in (collectives, exchange):
            patch.setattr(module, "run", at_once)


SHAPES = {"rows": (10, 24), "one row": (1, 24), "no rows": (0, 24), "batches": (2, 3, 5, 24), "a vector": (24,)}


def chunked(group: Group, shape: tuple[int, ...], chunks: int, options: Options, parts: bool) -> tuple[bool, int]:
    """Whether a chunked layer's output is that of the full layer, bit for bit, and how many reductions were started."""
    full, x = linear(), integers(*shape, seed=3)
    layer = RowwiseLinear.from_linear(full, group=group, blocks=[1, 3] if parts else None, options=options)
    layer.overlap = Overlap(chunks)
    mine: Any = layer.features.take(x, group.rank, group.size)
    if parts:
        mine = tuple(piece * 1 for piece in mine.split([24 // 4 // group.size, 18 // group.size], -1))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        calls = Started(patch)
        y = layer(mine)
        return torch.equal(y, full(x)) and y.is_contiguous(), calls["started"]


@pytest.mark.parametrize("parts", [False, True], ids=["one input", "two inputs"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("chunks", [2, 3, 16])
def test_chunks_are_the_whole_bit_for_bit(ranks, shape, chunks, parts):
    rows = torch.Size(shape[:-1]).numel()
    for same, started in ranks(2, chunked, shape, chunks, Options(), parts):
        assert same and started == (min(chunks, 7) if rows else 0)


HOW = {
    "in float64": Options(reduce_dtype=torch.float64),
    "full weights in place": Options(copy=False),
}


@pytest.mark.parametrize("options", HOW.values(), ids=HOW)
@pytest.mark.parametrize("size", [2, 3])
def test_so_they_are_with_every_option(ranks, size, options):
    assert ranks(size, chunked, (10, 24), 4, options, False) == [(True, 4)] * size


def in_order(group: Group) -> tuple[bool, int]:
    return chunked(Group.of(group, deterministic=True), (10, 24), 4, Options(), False)


def test_sums_in_rank_order_are_not_started_early(ranks):
    assert ranks(3, in_order) == [(True, 0)] * 3


def adapted(group: Group) -> bool:
    """An adapter with a bias beside the weight, and a split input."""
    from tp_layers.layers.low_rank import LowRank

    full, x = linear(), integers(10, 24, seed=3)
    lora = LowRank(integers(2, 24, seed=4), integers(7, 2, seed=5), integers(7, seed=6), 1.0)
    layer = RowwiseLinear.from_linear(full, group=group, split_input=True)
    layer.adapters["one"] = lora.shard(layer.spec, group)
    layer.overlap = Overlap(3)
    with torch.no_grad():
        return torch.equal(layer(x), full(x) + (x @ lora.down.t()) @ lora.up.t() + lora.bias)


def test_adapters_are_in_each_chunk(ranks):
    assert ranks(2, adapted) == [True, True]


def uneven(group: Group, flops: float) -> tuple[bool, int]:
    """Of a layer of which the ranks hold unequal parts, by rates: whether it is right, and its number of chunks."""
    full = nn.Linear(640, 1024)
    with torch.no_grad():
        full.weight.copy_(integers(1024, 640, seed=1))
        full.bias.copy_(integers(1024, seed=2))
    layer, x = RowwiseLinear.from_linear(full, group=group, granules=[5]), integers(4, 640, seed=3)
    layer.overlap = Overlap(Rates(flops=flops, latency=8e-6, transfer=1e9))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        calls = Started(patch)
        y = layer(layer.features.take(x, group.rank, group.size))
        return torch.equal(y, full(x)), calls["started"]


def test_ranks_with_unequal_parts_take_one_number_of_chunks(ranks):
    counts = set()
    # From where the GEMM is all of the time to where it is nothing, in small steps.
    for flops in [1e9 * 1.5**step for step in range(12)]:
        results = ranks(2, uneven, flops)
        assert results[0] == results[1] and results[0][0]
        counts.add(results[0][1])
    assert len(counts) > 2


def cast(group: Group) -> list[bool]:
    """Under autocast: the dtype and the bits of a layer in chunks are those of the whole."""
    full, x = linear(), integers(10, 24, seed=3)
    found = []
    for overlap in (None, Overlap(1), Overlap(4), Overlap(1, later=True)):
        layer = RowwiseLinear.from_linear(full, group=group)
        layer.overlap = overlap
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            found.append(layer(layer.features.take(x, group.rank, group.size)))
    return [y.dtype == torch.bfloat16 and torch.equal(y, found[0]) for y in found]


def test_autocast_gives_the_same_with_chunks(ranks):
    assert ranks(2, cast) == [[True] * 4] * 2


def two_alive(group: Group, later: bool) -> list[bool]:
    """Results of earlier calls stay what they were; one that is put off can be changed in place, and used twice."""
    full, layer = linear(), RowwiseLinear.from_linear(linear(), group=group)
    layer.overlap = Overlap(1 if later else 4, later)
    inputs = [integers(10, 24, seed=seed) for seed in (3, 4, 5)]
    with torch.no_grad():
        found = [layer(layer.features.take(x, group.rank, group.size)) for x in inputs]
        same = [torch.equal(y, full(x)) for x, y in zip(inputs, found, strict=True)]
        wanted = full(inputs[0]) * 2 + 1
        found[0].mul_(2).add_(1)
        return [*same, torch.equal(found[0], wanted), torch.equal(found[0].view(-1)[:3], wanted.view(-1)[:3])]


@pytest.mark.parametrize("later", [False, True], ids=["in chunks", "put off"])
def test_results_are_their_own(ranks, later):
    assert ranks(2, two_alive, later) == [[True] * 5] * 2


def gradient(group: Group) -> list[bool]:
    """Where something is differentiated the whole is reduced, and gradients are right."""
    full, layer = linear(), RowwiseLinear.from_linear(linear(), group=group)
    layer.overlap = Overlap(4, later=True)
    x = integers(10, 24, seed=3)
    full(x).sum().backward()
    with pytest.MonkeyPatch.context() as patch:
        calls = Started(patch)
        layer(layer.features.take(x, group.rank, group.size)).sum().backward()
    mine = layer.spec.take(full.weight.grad, group.rank, group.size)
    return [torch.equal(layer.weight.grad, mine), torch.equal(layer.bias.grad, full.bias.grad), not calls["started"]]


def test_gradients_are_right(ranks):
    assert ranks(2, gradient) == [[True] * 3] * 2


def outputs(group: Group, how: dict[str, Any], compiled: bool) -> tuple[list[torch.Tensor], int, list[int]]:
    """The output of a model, its digest, and how many reductions were started in chunks, or put off."""
    model = tp_layers.apply(FLUX.build(), group=group, **how)
    if compiled:
        model.compile(fullgraph=True, backend="aot_eager")
    layers = [module for module in model.modules() if isinstance(module, RowwiseLinear)]
    later = sum(layer.overlap is not None and layer.overlap.later for layer in layers)
    with pytest.MonkeyPatch.context() as patch:
        calls = Started(patch)
        found = run(model, FLUX.inputs())
    return found, digest(found), [calls["started"], later]


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (2, 3), (4, 2)])
def test_a_model_computes_what_one_rank_does(ranks, size, chunks, compiled):
    results = ranks(size, outputs, dict(overlap=chunks), compiled)
    assert compare([(found, bits) for found, bits, _ in results], run(FLUX.build(), FLUX.inputs())) <= FLOAT32
    for _, _, (started, later) in results:
        # Its double block has two streams.
        assert later == 1 and (started > 0) == (chunks > 1 and not compiled)


def with_rates(group: Group) -> tuple[bool, int]:
    """Compiled, a layer that overlaps by rates sums its whole output, for any number of rows."""
    full = linear()
    layer = RowwiseLinear.from_linear(full, group=group)
    layer.overlap = Overlap(Rates(flops=1e9, latency=1e-9, transfer=1e9))
    run_layer = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    same = []
    with torch.no_grad():
        for rows in (2048, 4096):
            x = integers(rows, 24, seed=3)
            same.append(torch.equal(run_layer(layer.features.take(x, group.rank, group.size)), full(x)))
    return all(same), len(same)


def test_rates_are_not_asked_in_compiled_code(ranks):
    assert ranks(2, with_rates) == [(True, 2)] * 2


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", None])
def test_what_is_no_number_of_chunks_is_refused(value):
    with pytest.raises(ValueError, match="overlap must be True, False, a number of chunks"):
        tp_layers.apply(FLUX.build(), group=Group(), overlap=value)
