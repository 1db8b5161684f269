"""The compiled kernels on a GPU, with the shipped tiles, against float64: the checks that the interpreter cannot do."""

import importlib
import pkgutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent / "interpreted"))

from rule import agree, check, draw, framed

from tp_layers.kernels.colwise import colwise, colwise_blocks
from tp_layers.kernels.gated import gated_colwise, gated_reference
from tp_layers.kernels.rms_norm import scale, scale_reference, sum_of_squares, sum_of_squares_reference
from tp_layers.kernels.rowwise import rowwise, rowwise_reference

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
ROWS = {"a modulation": 2, "text": 500, "an image": 1100}
DEPTHS = {"whole steps": 512, "ragged": 500}


@pytest.fixture(params=["bfloat16", "float16", "float32"])
def dtype(request):
    return getattr(torch, request.param)


def on_device(*tensors):
    # A copy to the device leaves the frame behind.
    return [framed(tensor.to(DEVICE)) for tensor in tensors]


def layer(rows, width, depth, dtype):
    weight = draw(width, depth, dtype=dtype, seed=1).mul_(depth**-0.5)
    return on_device(draw(rows, depth, dtype=dtype), weight, draw(width, dtype=dtype, seed=2))


@pytest.mark.parametrize("depth", DEPTHS.values(), ids=DEPTHS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_rowwise_of_one_and_two_inputs(rows, depth, dtype):
    x, weight, bias = layer(rows, 390, depth, dtype)
    agree(partial(rowwise, backend="triton"), rowwise_reference, x, weight, bias)

    def packed(x, weight, bias):
        return rowwise((x[:, :128], x[:, 128:]), weight, bias, backend="triton")

    agree(packed, rowwise_reference, x, weight, bias)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_rowwise_into_a_buffer_and_unrounded(backend, dtype):
    x, weight, bias = layer(1100, 390, 512, dtype)
    exact = rowwise_reference(x.double(), weight.double(), bias.double())
    wide = rowwise_reference(x.float(), weight.float(), bias.float())
    check(rowwise(x, weight, bias, out_dtype=torch.float32, backend=backend), wide, exact)
    buffer = torch.full((1100, 500), -1.0, dtype=dtype, device=DEVICE)
    out = rowwise(x, weight, bias, out=buffer[:, 64:454], backend=backend)
    check(out, rowwise_reference(x, weight, bias), exact)
    assert bool((buffer[:, :64] == -1).all()) and bool((buffer[:, 454:] == -1).all())


@pytest.mark.parametrize("depth", DEPTHS.values(), ids=DEPTHS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_colwise_of_unequal_blocks(rows, depth, dtype):
    x, weight, bias = layer(rows, 640, depth, dtype)
    blocks = {"ranges": [(0, 128), (136, 264), (264, 640)], "activations": [None, "silu", "gelu_tanh"]}
    agree(partial(colwise, **blocks, backend="triton"), partial(colwise, **blocks, backend="torch"), x, weight, bias)
    separate = colwise_blocks(x, weight, bias, **blocks, backend="triton")
    assert torch.equal(torch.cat(separate, -1), colwise(x, weight, bias, **blocks, backend="triton"))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_gated(rows, activation, dtype):
    for depth in DEPTHS.values():
        x, weight, bias = layer(rows, 640, depth, dtype)
        gate = {"activation": activation, "gate_first": False}
        agree(partial(gated_colwise, **gate, backend="triton"), partial(gated_reference, **gate), x, weight, bias)


@pytest.mark.parametrize("width", [3072, 1000])
def test_norm(width, dtype):
    x, weight = on_device(draw(70, width, dtype=dtype), draw(width, dtype=dtype, seed=3))
    agree(partial(sum_of_squares, backend="triton"), sum_of_squares_reference, x)
    squares = sum_of_squares(x, backend="triton")

    def of(function, x, squares, weight, **rest):
        return function(x, squares, 2 * width, 1e-6, weight, **rest)

    agree(partial(of, scale, backend="triton"), partial(of, scale_reference), x, squares, weight.contiguous())


def test_same_input_same_bits(dtype):
    x, weight, bias = layer(1100, 390, 512, dtype)
    first = rowwise(x, weight, bias, backend="triton")
    assert all(torch.equal(rowwise(x, weight, bias, backend="triton"), first) for _ in range(5))


def compiled():
    """How many kernels Triton holds compiled."""
    import tp_layers.kernels.jit as jit

    modules = [importlib.import_module(f"{jit.__name__}.{found.name}") for found in pkgutil.iter_modules(jit.__path__)]
    kernels = {id(value): value for module in modules for value in vars(module).values()}
    return sum(
        len(cache[0])
        for kernel in kernels.values()
        if hasattr(kernel, "device_caches")
        for cache in kernel.device_caches.values()
    )


OPERATIONS = {
    "rowwise": lambda x, w, b: rowwise(x, w, b, backend="triton"),
    "packed rowwise": lambda x, w, b: rowwise((x[:, :128], x[:, 128:]), w, b, backend="triton"),
    "colwise": lambda x, w, b: colwise(x, w, b, backend="triton"),
    "gated": lambda x, w, b: gated_colwise(x, w, b, backend="triton"),
    "norm": lambda x, w, b: scale(x, sum_of_squares(x, backend="triton"), 1024, 1e-6, backend="triton"),
}


@pytest.mark.parametrize("rows", [(400, 17, 64, 399), (1100, 513, 640, 4096)], ids=["text", "an image"])
@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_rows_do_not_recompile(operation, rows):
    x, weight, bias = layer(max(rows), 640, 512, torch.bfloat16)
    operation(x[: rows[0]], weight, bias)
    before = compiled()
    for count in rows[1:]:
        operation(x[:count], weight, bias)
    assert compiled() == before > 0
