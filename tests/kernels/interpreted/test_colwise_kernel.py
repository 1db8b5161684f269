"""The colwise kernel against float64: shapes, blocks of a shard and of a full weight, activations, gradients."""

from functools import partial

import pytest
import torch
from rule import SHAPES, agree, agree_gradients, draw, layer

from tp_layers.kernels import configs
from tp_layers.kernels.colwise import ACTIVATIONS, colwise, colwise_blocks, colwise_reference

kernel = partial(colwise, backend="triton")
twin = partial(colwise, backend="torch")
bfloat16, float32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(shape, dtype):
    agree(kernel, colwise_reference, *layer(*shape, dtype, bias=dtype))


@pytest.mark.parametrize("bias", [None, float32, bfloat16], ids=["none", "float32", "bfloat16"])
def test_bias_of_any_dtype(bias, dtype):
    agree(kernel, colwise_reference, *layer(37, 70, 45, dtype, bias))


def test_input_and_weight_of_any_strides(dtype):
    x, weight, bias = layer(12, 70, 45, dtype, dtype)
    views = x.t().contiguous().t().unflatten(0, (3, 4)), weight.t().contiguous().t()
    agree(kernel, colwise_reference, *views, bias)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_on_a_block_of_its_own(activation, dtype):
    blocks = {"ranges": [(0, 30), (30, 32), (32, 130)], "activations": [None, activation, activation]}
    x, weight, bias = layer(37, 130, 45, dtype, dtype)
    # Also where an activation saturates.
    x.mul_(4)
    agree(partial(kernel, **blocks), partial(twin, **blocks), x, weight, bias)


PACKED = {
    "three to one": [(0, 96), (96, 128)],
    "one row": [(0, 1), (1, 128)],
    "out of turn": [(100, 128), (3, 90)],
    # Rank 1 of 2 of a full [q, k, v, mlp] weight.
    "full weight": [(8, 16), (24, 32), (40, 48), (88, 128)],
    "one empty": [(0, 64), (64, 64), (64, 128)],
}


@pytest.mark.parametrize("ranges", PACKED.values(), ids=PACKED)
def test_unequal_blocks_side_by_side_and_one_by_one(ranges, dtype):
    activations = ["silu", None, "gelu", "gelu_tanh"][: len(ranges)]
    x, weight, bias = layer(37, 128, 45, dtype, dtype)
    pieces = [(weight[start:stop], bias[start:stop]) for start, stop in ranges]

    def by_hand(x, weight, bias):
        cut = [colwise_reference(x, weight[start:stop], bias[start:stop]) for start, stop in ranges]
        return tuple(y if name is None else ACTIVATIONS[name](y) for y, name in zip(cut, activations, strict=True))

    blocks = partial(colwise_blocks, ranges=ranges, activations=activations, backend="triton")
    agree(blocks, by_hand, x, weight, bias)
    side_by_side = kernel(x, weight, bias, ranges=ranges, activations=activations)
    assert torch.equal(side_by_side, torch.cat(blocks(x, weight, bias), -1))
    assert [y.shape for y in blocks(x, weight, bias)] == [(37, len(piece)) for piece, _ in pieces]


def test_blocks_are_contiguous_tensors_of_their_own(dtype):
    x, weight, _ = layer(12, 128, 45, dtype)
    ys = colwise_blocks(x.reshape(3, 4, 45), weight, ranges=[(0, 96), (96, 128)], backend="triton")
    assert [tuple(y.shape) for y in ys] == [(3, 4, 96), (3, 4, 32)]
    assert all(y.is_contiguous() for y in ys)
    assert len({y.untyped_storage().data_ptr() for y in ys}) == 2


@pytest.mark.parametrize("rows", [0, 1], ids=["no rows", "one row"])
def test_blocks_of_few_rows(rows, dtype):
    x, weight, bias = layer(rows, 128, 45, dtype, dtype)
    blocks = {"ranges": [(0, 96), (96, 128)], "activations": ["gelu", None]}
    agree(partial(kernel, **blocks), partial(twin, **blocks), x, weight, bias)


@pytest.mark.parametrize("half", [bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("rows", [1, 70], ids=["one row", "ragged"])
def test_tma_where_the_tensors_take_it(rows, half, monkeypatch, launched):
    """As on a GPU with 4 processors, in tiles of the interpreter's size."""
    monkeypatch.setattr("tp_layers.kernels.ops.tma_tile_for", lambda *which: configs.INTERPRETED)
    monkeypatch.setattr("tp_layers.kernels.backend.processors", lambda device: 4)
    x, weight, bias = layer(rows, 150, 64, half, half)
    blocks = {"ranges": [(3, 33), (40, 70), (80, 150)], "activations": ["gelu_tanh", None, "silu"]}
    for b in (bias, None):
        agree(partial(kernel, **blocks), partial(twin, **blocks), x, weight, b)
    agree(partial(kernel, **blocks), partial(twin, **blocks), x[:, :45], weight[:, :45], bias)
    assert launched == ["colwise_tma_kernel", "colwise_tma_kernel", "colwise_kernel"]


@pytest.mark.parametrize("separate", [False, True], ids=["side by side", "one by one"])
def test_gradients_are_those_of_the_twin(separate):
    x, weight, bias = layer(5, 70, 45, float32, float32)
    blocks = {"ranges": [(0, 30), (40, 70)], "activations": ["gelu_tanh", None]}
    function = colwise_blocks if separate else colwise

    def loss(backend, *tensors):
        result = function(*tensors, **blocks, backend=backend)
        return sum(y.square().sum() for y in (result if separate else (result,)))

    agree_gradients(loss, x, weight, bias)


def test_a_frozen_parameter_and_a_missing_bias_have_no_gradient():
    x, weight, _ = layer(5, 70, 45, float32)
    x.requires_grad_()
    kernel(x, weight, activations=["silu"]).sum().backward()
    assert x.grad is not None and weight.grad is None
    assert torch.equal(x.grad, torch.autograd.grad(twin(x, weight, activations=["silu"]).sum(), x)[0])


def test_other_input_other_result():
    x, weight, _ = layer(5, 70, 45, float32)
    assert not torch.equal(kernel(x, weight), kernel(draw(5, 45, dtype=float32, seed=9), weight))
