"""Sharded layers under torch.compile: one graph, functional collectives, and the eager results, gradients included.

`aot_eager` traces forward and backward as inductor would, and needs no C++ compiler to run them.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.fx import GraphModule

import tp_layers
from close import FLOAT32, randomise, relative_error
from families import FAMILIES
from tp_layers import AcrossRMSNorm, ColwiseLinear, RowwiseLinear
from tp_layers.group import Group
from tp_layers.layers.options import Options

WIDTH, INNER = 8, 24
ALL_REDUCE = torch.ops._c10d_functional.all_reduce
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor

sizes = pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
modes = pytest.mark.parametrize("train", [False, True], ids=["forward", "forward and backward"])


def draw(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class MLP(nn.Module):
    """colwise -> GELU -> rowwise."""

    def __init__(self, group: Group, options: Options) -> None:
        super().__init__()
        full = randomise(nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)))
        self.up = ColwiseLinear.from_linear(full[0], group=group, options=options)
        self.down = RowwiseLinear.from_linear(full[1], group=group, options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Gated(nn.Module):
    """A packed projection, its halves gated, one of them normed across ranks; the rowwise one takes two inputs."""

    def __init__(self, group: Group, options: Options) -> None:
        super().__init__()
        full = nn.Sequential(nn.Linear(WIDTH, 2 * INNER), nn.RMSNorm(INNER, eps=1e-6), nn.Linear(2 * INNER, WIDTH))
        randomise(full)
        self.up = ColwiseLinear.from_linear(full[0], group=group, blocks=[1, 1], options=options)
        self.norm = AcrossRMSNorm.from_norm(full[1], group=group, options=options)
        self.down = RowwiseLinear.from_linear(full[2], group=group, blocks=[1, 1], options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down((nn.functional.silu(gate) * up, self.norm(up)))


class Whole(nn.Module):
    """Whole in and out of both layers: a gathered colwise output, and a rowwise layer that splits its input."""

    def __init__(self, group: Group, options: Options) -> None:
        super().__init__()
        full = randomise(nn.Sequential(nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)))
        self.up = ColwiseLinear.from_linear(full[0], group=group, gather=True, options=options)
        self.down = RowwiseLinear.from_linear(full[1], group=group, split_input=True, options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


BLOCKS = {block.__name__: block for block in (MLP, Gated, Whole)}
OPTIONS = {"own dtype": Options(), "reduced in float64": Options(reduce_dtype=torch.float64)}


def targets(graph: GraphModule) -> set[Any]:
    """What the nodes of a graph call, those of its subgraphs (an autograd function's) too."""
    called = {
        node.target for module in graph.modules() if isinstance(module, GraphModule) for node in module.graph.nodes
    }
    return {getattr(target, "overloadpacket", target) for target in called}


def both(
    model: nn.Module, call: Callable[[nn.Module], list[torch.Tensor]], train: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], CompileCounterWithBackend]:
    """The outputs of `call`, and with `train` the gradients of their sum, eager and compiled into one graph."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    results = []
    for module in (model, torch.compile(model, fullgraph=True, backend=counter)):
        model.zero_grad()
        with torch.set_grad_enabled(train):
            outputs = call(module)
        if train:
            sum(output.square().sum() for output in outputs).backward()
        grads = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        assert bool(grads) == train
        results.append([output.detach() for output in outputs] + grads)
    assert len(results[0]) == len(results[1])
    return *results, counter


def block(group: Group, name: str, options: str, train: bool) -> dict[str, Any]:
    model = BLOCKS[name](group, OPTIONS[options])
    inputs = draw(2, 3, WIDTH).requires_grad_(train)
    gradients = []

    def call(module: nn.Module) -> list[torch.Tensor]:
        inputs.grad = None
        y = module(inputs)
        if train:
            gradients.append(torch.autograd.grad(y.square().sum(), inputs, retain_graph=True)[0])
        return [y]

    eager, compiled, counter = both(model, call, train)
    (graph,) = counter.graphs
    return {"eager": eager + gradients[:1], "compiled": compiled + gradients[1:], "targets": str(targets(graph))}


@sizes
@modes
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", BLOCKS)
def test_a_sharded_block_is_one_graph_and_equals_eager(ranks, name, size, train, options):
    for found in ranks(size, block, name, options, train):
        for got, wanted in zip(found["compiled"], found["eager"], strict=True):
            assert torch.equal(got, wanted)
        called = found["targets"]
        assert (str(ALL_REDUCE) in called) == (size > 1)
        assert (str(ALL_GATHER) in called) == (size > 1 and name == "Whole")
        assert "distributed_c10d" not in called


def bias_gradients(group: Group) -> torch.Tensor:
    model = MLP(group, Options())
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, backend="aot_eager")(draw(3, WIDTH)).sum().backward()
    return model.down.bias.grad


@sizes
def test_every_rank_has_the_rowwise_biases_gradient_under_compile(ranks, size):
    for found in ranks(size, bias_gradients):
        assert torch.equal(found, torch.full((WIDTH,), 3.0))


def family(group: Group, name: str, train: bool) -> dict[str, Any]:
    model, inputs = tp_layers.apply(FAMILIES[name].build(), group=group), FAMILIES[name].inputs()

    def call(module: nn.Module) -> list[torch.Tensor]:
        return [y for y in module(**inputs, return_dict=False) if isinstance(y, torch.Tensor)]

    eager, compiled, counter = both(model, call, train)
    return {"eager": eager, "compiled": compiled, "graphs": counter.frame_count}


@sizes
@modes
def test_a_sharded_model_is_one_graph_and_equals_eager(ranks, size, train):
    for found in ranks(size, family, "Flux2Transformer2DModel", train):
        assert found["graphs"] == 1
        for got, wanted in zip(found["compiled"], found["eager"], strict=True):
            assert relative_error(got, wanted) <= FLOAT32


def graphs_for_rows(group: Group, name: str) -> list[int]:
    """How many graphs there are after calls with these numbers of rows."""
    model = BLOCKS[name](group, Options())
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    counts = []
    with torch.no_grad():
        for rows in (3, 5, 8, 17, 600, 3):
            x = draw(rows, WIDTH)
            assert torch.equal(compiled(x), model(x))
            counts.append(counter.frame_count)
    return counts


@sizes
@pytest.mark.parametrize("name", BLOCKS)
def test_another_number_of_rows_is_compiled_once_and_for_all(ranks, size, name):
    for counts in ranks(size, graphs_for_rows, name):
        # The first is compiled for its own extents, the second for any number of rows.
        assert counts == [1, 2, 2, 2, 2, 2]
