"""The gated kernel against float64: shapes, both orders of the blocks, activations, a full weight, gradients."""

from functools import partial

import pytest
import torch
from rule import SHAPES, agree, agree_gradients, layer

from tp_layers.kernels import configs
from tp_layers.kernels.colwise import ACTIVATIONS
from tp_layers.kernels.gated import gated_colwise, gated_reference

kernel = partial(gated_colwise, backend="triton")
bfloat16, float32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(shape, dtype):
    rows, width, depth = shape
    agree(kernel, gated_reference, *layer(rows, 2 * width, depth, dtype, bias=dtype))


@pytest.mark.parametrize("bias", [None, float32, bfloat16], ids=["none", "float32", "bfloat16"])
def test_bias_of_any_dtype(bias, dtype):
    agree(kernel, gated_reference, *layer(37, 140, 45, dtype, bias))


@pytest.mark.parametrize("gate_first", [True, False], ids=["gate first", "up first"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_both_orders_and_every_activation(activation, gate_first, dtype):
    x, weight, bias = layer(37, 140, 45, dtype, dtype)
    x.mul_(4)
    which = {"activation": activation, "gate_first": gate_first}
    agree(partial(kernel, **which), partial(gated_reference, **which), x, weight, bias)


@pytest.mark.parametrize("gate_first", [True, False], ids=["gate first", "up first"])
def test_rows_of_a_full_weight_in_place(gate_first, dtype):
    """Rank 1 of 2 of blocks of 70 rows."""
    x, weight, bias = layer(37, 140, 45, dtype, dtype)

    def by_hand(x, weight, bias):
        cut = torch.cat([weight[35:70], weight[105:140]]), torch.cat([bias[35:70], bias[105:140]])
        return gated_reference(x, *cut, gate_first=gate_first)

    agree(partial(kernel, ranges=[(35, 70), (105, 140)], gate_first=gate_first), by_hand, x, weight, bias)


def test_input_and_weight_of_any_strides(dtype):
    x, weight, bias = layer(12, 140, 45, dtype, dtype)
    views = x.t().contiguous().t().unflatten(0, (3, 4)), weight.t().contiguous().t()
    agree(kernel, gated_reference, *views, bias)


@pytest.mark.parametrize("half", [bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 70], ids=["one row", "ragged"])
def test_tma_where_the_tensors_take_it(rows, half, monkeypatch, launched):
    """As on a GPU with 4 processors, in tiles of the interpreter's size."""
    monkeypatch.setattr("tp_layers.kernels.ops.tma_tile_for", lambda *which: configs.INTERPRETED)
    monkeypatch.setattr("tp_layers.kernels.backend.processors", lambda device: 4)
    x, weight, bias = layer(rows, 140, 64, half, half)
    for b in (bias, None):
        agree(kernel, gated_reference, x, weight, b)
    agree(kernel, gated_reference, x[:, :45], weight[:, :45], bias)
    assert launched == ["gated_tma_kernel", "gated_tma_kernel", "gated_kernel"]


def test_gradients_are_those_of_the_twin():
    def loss(backend, *tensors):
        return gated_colwise(*tensors, activation="gelu", backend=backend).square().sum()

    agree_gradients(loss, *layer(5, 140, 45, float32, float32))
