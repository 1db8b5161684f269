"""The registered operations with their kernels: torch's own checks of each; compiled calls launch, and equal eager."""

import pytest
import torch
from rule import draw
from torch._dynamo.testing import CompileCounterWithBackend

from tp_layers.kernels import ops
from tp_layers.kernels.colwise import colwise, colwise_blocks
from tp_layers.kernels.gated import gated_colwise
from tp_layers.kernels.rms_norm import scale, sum_of_squares
from tp_layers.kernels.rowwise import rowwise

HALF, WIDE = torch.bfloat16, torch.float32
RANGES, ACTIVATIONS = [(0, 30), (40, 70)], [None, "gelu"]


def tensors(dtype=HALF, rows=5):
    """`x [1, rows, 45]`, `weight [70, 45]`, `bias [70]`."""
    return draw(1, rows, 45, dtype=dtype), draw(70, 45, dtype=dtype, seed=1), draw(70, dtype=dtype, seed=2)


# Of opcheck's tests, all but that of a registered gradient: the launchers' autograd functions call the operations.
CHECKS = ("test_schema", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic")

# The operation's arguments from x, weight and bias.
ARGUMENTS = {
    "rowwise": (ops.rowwise, lambda x, w, b: ([x], w, b, [0], None)),
    "rowwise of two inputs": (ops.rowwise, lambda x, w, b: ([x[..., :5], x[..., 9:20]], w, None, [0, 7], WIDE)),
    "rowwise into a buffer": (ops.rowwise_out, lambda x, w, b: ([x], w, b, [0], x.new_zeros(1, 5, 90)[..., 10:80])),
    "colwise": (ops.colwise, lambda x, w, b: (x, w, b, [0, 40], [30, 7], ["", "silu"])),
    "colwise blocks": (ops.colwise_blocks, lambda x, w, b: (x, w, None, [0, 40], [30, 7], ["", "gelu"])),
    "gated": (ops.gated, lambda x, w, b: (x, w, b, 3, 40, 20, "gelu_tanh")),
    "sum of squares": (ops.sum_of_squares, lambda x, w, b: (x,)),
    "scale": (ops.scale, lambda x, w, b: (x, torch.ones(1, 5, 1), w[0], b[:45], 90, 1e-6, False)),
    "scale, rounded first": (ops.scale, lambda x, w, b: (x, torch.ones(1, 5, 1), w[0].float(), None, 90, 1e-6, True)),
}


@pytest.mark.parametrize(("operation", "arguments"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_schema_and_fake_agree_with_the_launch(operation, arguments):
    torch.library.opcheck(operation, arguments(*tensors()), test_utils=CHECKS)


def scaled(x, weight, bias):
    return scale(x, sum_of_squares(x, backend="triton"), 90, 1e-6, weight[0], bias[:45], backend="triton")


def into(x, weight, bias):
    out = x.new_zeros(*x.shape[:-1], 90)
    rowwise(x, weight, bias, out=out[..., 10:80], backend="triton")
    return out


CALLS = {
    "rowwise": lambda x, w, b: rowwise(x, w, b, backend="triton"),
    "rowwise of two inputs": lambda x, w, b: rowwise(x.split([5, 40], -1), w, b, out_dtype=WIDE, backend="triton"),
    "rowwise without its bias": lambda x, w, b: rowwise(x, w, b, False, backend="triton"),
    "colwise": lambda x, w, b: colwise(x, w, b, ranges=RANGES, activations=ACTIVATIONS, backend="triton"),
    "colwise blocks": lambda x, w, b: colwise_blocks(x, w, b, ranges=RANGES, backend="triton")[1],
    "gated": lambda x, w, b: gated_colwise(x, w, b, backend="triton"),
    "rms norm": scaled,
}


@pytest.mark.parametrize("train", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_compiled_call_launches_and_equals_eager(call, train, launched):
    torch._dynamo.reset()
    counts, results = [], []
    for function in (call, torch.compile(call, fullgraph=True, backend="aot_eager")):
        inputs = [tensor.clone().requires_grad_(train) for tensor in tensors()]
        launched.clear()
        with torch.set_grad_enabled(train):
            y = function(*inputs)
        if train:
            y.float().square().sum().backward()
        counts.append(list(launched))
        results.append([y.detach(), *(tensor.grad for tensor in inputs if train)])
    assert counts[0] == counts[1] and counts[0]
    assert all(torch.equal(got, wanted) for wanted, got in zip(*results, strict=True))


def test_a_compiled_call_writes_the_callers_buffer(launched):
    torch._dynamo.reset()
    with torch.no_grad():
        y = torch.compile(into, fullgraph=True, backend="aot_eager")(*tensors())
        assert launched == ["rowwise_kernel"]
        assert torch.equal(y, into(*tensors()))


@pytest.mark.parametrize("name", ["rowwise", "colwise", "gated", "rms norm"])
def test_another_number_of_rows_is_compiled_once_and_for_all(name, launched):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(CALLS[name], fullgraph=True, backend=counter)
    with torch.no_grad():
        for rows in (3, 5, 17, 70):
            inputs = tensors(WIDE, rows)
            assert torch.equal(compiled(*inputs), CALLS[name](*inputs))
    assert counter.frame_count == 2
