"""The registered operations without a kernel: schemas, fakes, and what torch.compile makes of a launcher."""

import contextlib

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from tp_layers.kernels import backend, measured, ops
from tp_layers.kernels.colwise import colwise, colwise_blocks
from tp_layers.kernels.gated import gated_colwise
from tp_layers.kernels.rms_norm import scale, sum_of_squares
from tp_layers.kernels.rowwise import rowwise

CHOOSE = backend.choose
RANGES, ACTIVATIONS = [(0, 2), (4, 8)], [None, "gelu"]


def scaled(x, weight, bias, dtype=None):
    squares = x.new_ones((*x.shape[:-1], 1), dtype=torch.float32)
    return scale(x, squares, 12, 1e-6, weight[0] if dtype is None else weight[0].to(dtype), None, dtype is not None)


def into(x, weight, bias):
    out = x.new_empty((*x.shape[:-1], 20))[..., 4:12]
    rowwise(x, weight, bias, out=out)
    return out


# A call of each launcher on x [2, 3, 6], weight [8, 6] and bias [8], the operation it is, and the width of its result.
CALLS = {
    "rowwise": (lambda x, w, b: rowwise(x, w, b), ops.rowwise, 8),
    "rowwise of two inputs": (lambda x, w, b: rowwise(x.split([2, 4], -1), w, b), ops.rowwise, 8),
    "rowwise of columns": (lambda x, w, b: rowwise(x[..., :3], w, b, ranges=[(0, 1), (4, 6)]), ops.rowwise, 8),
    "rowwise without its bias": (lambda x, w, b: rowwise(x, w, b, False), ops.rowwise, 8),
    "colwise": (lambda x, w, b: colwise(x, w, b), ops.colwise, 8),
    "colwise packed": (lambda x, w, b: colwise(x, w, b, ranges=RANGES, activations=ACTIVATIONS), ops.colwise, 6),
    "colwise in blocks": (
        lambda x, w, b: colwise_blocks(x, w, b, ranges=RANGES, activations=ACTIVATIONS)[1],
        ops.colwise_blocks,
        4,
    ),
    "gated": (lambda x, w, b: gated_colwise(x, w, b, activation="gelu_tanh", gate_first=False), ops.gated, 4),
    "sum of squares": (lambda x, w, b: sum_of_squares(x), ops.sum_of_squares, 1),
    "scale": (scaled, ops.scale, 6),
}
calls = pytest.mark.parametrize(("call", "operation", "width"), CALLS.values(), ids=CALLS)


@pytest.fixture(autouse=True)
def triton_everywhere(monkeypatch):
    """The operations are taken on any device: nothing is launched for a tensor without storage."""
    monkeypatch.setattr(backend, "choose", lambda *which: "triton")


def tensors(dtype=torch.bfloat16, device="meta"):
    return [torch.empty(shape, dtype=dtype, device=device) for shape in ((2, 3, 6), (8, 6), (8,))]


@calls
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_the_fake_gives_a_contiguous_result_of_the_operations_shape_and_dtype(call, operation, width, kind):
    with FakeTensorMode() if kind == "fake" else contextlib.nullcontext():
        x, weight, bias = tensors(device="cpu" if kind == "fake" else "meta")
        y = call(x, weight, bias)
    assert y.shape == (2, 3, width) and y.is_contiguous() and y.device == x.device
    assert y.dtype == (torch.float32 if operation is ops.sum_of_squares else torch.bfloat16)


def test_the_fakes_of_a_wider_sum_and_of_a_rounded_norm():
    x, weight, bias = tensors()
    assert rowwise(x, weight, bias, out_dtype=torch.float32).dtype == torch.float32
    assert scaled(x, weight, bias, torch.float32).dtype == torch.float32


@calls
@pytest.mark.parametrize("train", [False, True], ids=["forward", "forward and backward"])
def test_a_launcher_is_one_node_of_one_graph_and_differentiable(call, operation, width, train):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    inputs = [tensor.requires_grad_(train) for tensor in tensors()]
    with torch.set_grad_enabled(train):
        y = torch.compile(call, fullgraph=True, backend=counter)(*inputs)
    (graph,) = counter.graphs
    called = [node.target for module in graph.modules() if hasattr(module, "graph") for node in module.graph.nodes]
    assert called.count(operation) == 1
    assert y.shape == (2, 3, width) and y.requires_grad == train
    if train:
        y.sum().backward()
        # The rowwise bias has its gradient on the ranks that do not add it, too.
        used = {ops.sum_of_squares: (True, False, False), ops.scale: (True, True, False)}
        assert [tensor.grad is not None for tensor in inputs] == list(used.get(operation, (True, True, True)))
        assert all(tensor.grad is None or tensor.grad.shape == tensor.shape for tensor in inputs)


def test_a_callers_buffer_is_written_by_an_operation_that_returns_nothing():
    schema = ops.rowwise_out._schema
    assert not schema.returns
    assert [argument.name for argument in schema.arguments if argument.is_write] == ["out"]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    with torch.no_grad():
        out = torch.compile(into, fullgraph=True, backend=counter)(*tensors())
    assert [node.target for node in counter.graphs[0].graph.nodes].count(ops.rowwise_out) == 1
    assert out.shape == (2, 3, 8) and out.stride() == (60, 20, 1)
    with pytest.raises(ValueError, match="out= is not differentiable"):
        into(*(tensor.requires_grad_() for tensor in tensors()))


@pytest.mark.parametrize("operation", ["rowwise", "colwise", "colwise_blocks", "gated", "sum_of_squares", "scale"])
def test_no_operation_but_the_one_into_a_buffer_writes_or_aliases_an_argument(operation):
    schema = getattr(ops, operation)._schema
    assert all(argument.alias_info is None for argument in (*schema.arguments, *schema.returns))


def test_any_number_of_rows_is_compiled_once():
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(lambda x, w, b: rowwise(x, w, b), fullgraph=True, backend=counter)
    _, weight, bias = tensors()
    with torch.no_grad():
        shapes = [compiled(torch.empty(rows, 6, dtype=weight.dtype, device="meta"), weight, bias).shape
                  for rows in (3, 8, 17, 600, 5000)]  # fmt: skip
    assert shapes == [(rows, 8) for rows in (3, 8, 17, 600, 5000)]
    assert counter.frame_count == 2


def untraceable(fact):
    torch._dynamo.graph_break()
    return fact


@pytest.mark.parametrize(
    ("measurements", "graphs"), [({}, 2), ({("sm_90", "rowwise", "few", "half"): "triton"}, 4)], ids=["none", "differ"]
)
def test_the_choice_on_cuda_breaks_no_graph(monkeypatch, measurements, graphs):
    """A graph for a first number of rows, and one for any; or one for each shape class, where measurements differ."""
    monkeypatch.setattr(backend, "choose", CHOOSE)
    monkeypatch.setattr(backend, "architecture", backend.constant(lambda device: untraceable("sm_90")))
    monkeypatch.setattr(backend, "has_triton", backend.constant(lambda: untraceable(True)))
    monkeypatch.setattr(measured, "FASTER", measurements)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(
        lambda x, w, b: (rowwise(x, w, b), gated_colwise(x, w, b)), fullgraph=True, backend=counter
    )
    with FakeTensorMode(), torch.no_grad():
        _, weight, bias = tensors(device="cuda")
        for rows in (3, 8, 17, 600, 5000):
            y, gated = compiled(torch.empty(rows, 6, dtype=weight.dtype, device="cuda"), weight, bias)
            assert y.shape == (rows, 8) and gated.shape == (rows, 4)
    called = [[node.target for node in graph.graph.nodes] for graph in counter.graphs]
    assert len(called) == graphs and all(ops.gated in targets for targets in called)
    assert [ops.rowwise in targets for targets in called] == [bool(measurements)] * 2 + [False] * (graphs - 2)
