"""The rowwise kernel against float64: shapes, strides, several inputs, the caller's buffer, gradients."""

from functools import partial

import pytest
import torch
from rule import SHAPES, agree, agree_gradients, check, draw, framed, layer, surrounded

from tp_layers.kernels import configs
from tp_layers.kernels.rowwise import rowwise, rowwise_reference

kernel = partial(rowwise, backend="triton")
bfloat16, float32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape(shape, dtype):
    agree(kernel, rowwise_reference, *layer(*shape, dtype, bias=dtype))


@pytest.mark.parametrize("bias", [None, float32, bfloat16], ids=["none", "float32", "bfloat16"])
def test_bias_of_any_dtype(bias, dtype):
    agree(kernel, rowwise_reference, *layer(37, 70, 45, dtype, bias))


def test_bias_is_added_exactly_once_and_only_if_told(dtype):
    x, weight, bias = layer(3, 70, 45, dtype, dtype)
    bias.mul_(1000)
    weight.zero_()
    assert torch.equal(kernel(x, weight, bias), bias.expand(3, -1))
    assert not kernel(x, weight, bias, add_bias=False).any()


STRIDED = {
    "three dims": lambda x: x.reshape(3, 4, 45),
    "five dims": lambda x: x.reshape(1, 3, 1, 4, 45),
    "transposed": lambda x: x.t().contiguous().t(),
    "leading dims transposed": lambda x: x.reshape(3, 4, 45).transpose(0, 1),
    "expanded": lambda x: x[:1].expand(12, -1).unflatten(0, (3, 4)),
    "every second column": lambda x: x.repeat_interleave(2, -1)[:, ::2],
    "one dim": lambda x: x[0],
}


@pytest.mark.parametrize("view", STRIDED.values(), ids=STRIDED)
def test_input_of_any_strides(view, dtype):
    x, weight, bias = layer(12, 70, 45, dtype, dtype)
    agree(kernel, rowwise_reference, view(x), weight, bias)


def test_transposed_weight(dtype):
    x, weight, bias = layer(12, 70, 45, dtype, dtype)
    agree(kernel, rowwise_reference, x, weight.t().contiguous().t(), bias)


@pytest.mark.parametrize(
    "widths", [(32, 64), (33, 1, 70), (5, 0, 40)], ids=["whole steps", "three ragged", "one empty"]
)
def test_several_inputs_walk_the_weight_in_turn(widths, dtype):
    _, weight, bias = layer(1, 70, sum(widths), dtype, dtype)
    xs = [draw(37, width, dtype=dtype, seed=width) for width in widths]

    def packed(weight, bias, *xs):
        return kernel(xs, weight, bias)

    agree(packed, lambda weight, bias, *xs: rowwise_reference(xs, weight, bias), weight, bias, *xs)


def test_columns_of_a_full_weight_in_place(dtype):
    """Rank 1 of 3 of a weight packed from blocks of 33 and 60 columns; one tensor and two give the same."""
    ranges = [(11, 22, 0), (53, 73, 11)]
    x, weight, bias = layer(37, 70, 93, dtype, dtype)
    x = draw(37, 31, dtype=dtype)

    def twin(x, weight, bias):
        return rowwise_reference(x, torch.cat([weight[:, 11:22], weight[:, 53:73]], 1), bias)

    agree(partial(kernel, ranges=ranges), twin, x, weight, bias)
    whole = kernel(x, weight, bias, ranges=ranges)
    assert torch.equal(kernel((x[:, :11], x[:, 11:]), weight, bias, ranges=ranges), whole)


def test_buffer_of_any_row_stride_and_nothing_beside_it(dtype):
    x, weight, bias = layer(37, 70, 45, dtype, dtype)
    out = framed(torch.zeros(37, 70, dtype=dtype))
    assert kernel(x, weight, bias, out=out) is out
    own = rowwise_reference(x.contiguous(), weight.contiguous(), bias)
    check(out, own, rowwise_reference(x.double(), weight.double(), bias.double()))
    assert surrounded(out)


def test_buffer_of_three_dims(dtype):
    x, weight, bias = layer(12, 70, 45, dtype, dtype)
    buffer = torch.full((3, 4, 100), -1.0, dtype=dtype)
    kernel(x.reshape(3, 4, 45), weight, bias, out=buffer[..., 10:80])
    assert torch.equal(buffer[..., 10:80].flatten(0, 1), kernel(x, weight, bias))
    assert bool((buffer[..., :10] == -1).all()) and bool((buffer[..., 80:] == -1).all())


def test_float32_result_is_not_rounded_to_the_inputs_dtype(dtype):
    x, weight, bias = layer(37, 70, 45, dtype, dtype)
    wide = x.float(), weight.float(), bias.float()
    exact = rowwise_reference(x.double(), weight.double(), bias.double())
    check(kernel(x, weight, bias, out_dtype=float32), rowwise_reference(*wide), exact)


def test_row_offsets_past_two_to_the_31(dtype):
    """Three rows 2**30 apart; the memory between them is never touched."""
    storage = torch.empty(2**31 + 40, dtype=dtype)
    x = storage.as_strided((3, 40), (2**30, 1))
    values, weight, _ = layer(3, 5, 40, dtype)
    x.copy_(values)
    assert torch.equal(kernel(x, weight), kernel(values, weight))


def test_two_results_alive_at_once(dtype):
    x, weight, bias = layer(5, 70, 45, dtype, dtype)
    first = kernel(x, weight, bias)
    kept = first.clone()
    second = kernel(-x, weight, bias)
    assert torch.equal(first, kept) and not torch.equal(second, first)
    assert torch.equal(kernel(x, weight, bias), first)


@pytest.mark.parametrize("half", [bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("widths", [(64,), (32, 64)], ids=["one input", "two inputs"])
@pytest.mark.parametrize("rows", [1, 70, 96], ids=["one row", "ragged", "whole tiles"])
def test_tma_where_the_tensors_take_it(rows, widths, half, monkeypatch, launched):
    """As on a GPU with 4 processors, in tiles of the interpreter's size."""
    monkeypatch.setattr("tp_layers.kernels.ops.tma_tile_for", lambda *which: configs.INTERPRETED)
    monkeypatch.setattr("tp_layers.kernels.backend.processors", lambda device: 4)
    _, weight, bias = layer(1, 130, sum(widths), half, half)
    xs = [draw(rows, width, dtype=half, seed=width) for width in widths]

    def packed(weight, bias, *xs):
        return kernel(xs, weight, bias)

    for b in (bias, None):
        agree(packed, lambda weight, bias, *xs: rowwise_reference(xs, weight, bias), weight, b, *xs)
    assert launched == ["rowwise_tma_kernel"] * 2


UNFIT = {
    "ragged depth": lambda x, weight: (x[:, :60], weight[:, :60]),
    "transposed": lambda x, weight: (x.t().contiguous().t(), weight),
    "unaligned start": lambda x, weight: (x[:, 1:33], weight[:, :32]),
    "unaligned rows": lambda x, weight: (x.new_zeros(70, 101)[:, :64].copy_(x), weight),
    "one row for all": lambda x, weight: (x[:1].expand(70, -1), weight),
    "no rows": lambda x, weight: (x[:0], weight),
    "float32": lambda x, weight: (x.float(), weight.float()),
}


@pytest.mark.parametrize("change", UNFIT.values(), ids=UNFIT)
def test_pointers_where_they_do_not(change, monkeypatch, launched):
    monkeypatch.setattr("tp_layers.kernels.ops.tma_tile_for", lambda *which: configs.INTERPRETED)
    agree(kernel, rowwise_reference, *change(draw(70, 64, dtype=bfloat16), draw(40, 64, dtype=bfloat16, seed=1)))
    assert launched == ["rowwise_kernel"]


@pytest.mark.parametrize("add_bias", [True, False], ids=["with bias", "without"])
def test_gradients_are_those_of_the_twin_and_the_bias_has_one_on_every_rank(add_bias):
    _, weight, bias = layer(1, 7, 45, float32, float32)
    xs = [draw(5, 20, dtype=float32), draw(5, 25, dtype=float32, seed=3)]

    def loss(backend, weight, bias, *xs):
        if backend == "triton":
            return rowwise(xs, weight, bias, add_bias=add_bias, backend=backend).square().sum()
        # Autograd of the plain expression: a bias that another rank adds has the gradient it has there.
        y = rowwise_reference(xs, weight, bias)
        return (y if add_bias else y - bias.detach()).square().sum()

    agree_gradients(loss, weight, bias, *xs)
