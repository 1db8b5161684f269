"""The two norm kernels against float64: shapes, strides, parameters' dtypes, the order of rounding, gradients."""

from functools import partial

import pytest
import torch
from rule import agree, agree_gradients, check, draw

from tp_layers.kernels.rms_norm import (
    rms_norm_reference,
    scale,
    scale_reference,
    sum_of_squares,
    sum_of_squares_reference,
)

squares_kernel = partial(sum_of_squares, backend="triton")
scale_kernel = partial(scale, backend="triton")
bfloat16, float32 = torch.bfloat16, torch.float32

# (rows, channels) against interpreted steps of 64.
SHAPES = {
    "one element": (1, 1),
    "one row": (1, 150),
    "no rows": (0, 40),
    "whole steps": (3, 128),
    "ragged": (5, 150),
}


def scaled(function, x, squares, weight, bias, **rest):
    return function(x, squares, 300, 1e-5, weight, bias, **rest)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_sum_of_squares_of_every_shape(shape, dtype):
    agree(squares_kernel, sum_of_squares_reference, draw(*shape, dtype=dtype))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_scale_of_every_shape(shape, dtype):
    x, weight = draw(*shape, dtype=dtype), torch.randn(shape[1]).to(dtype)
    squares = sum_of_squares_reference(x)
    agree(partial(scaled, scale_kernel), partial(scaled, scale_reference), x, squares, weight, None)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("weight", [None, float32, bfloat16], ids=["no weight", "float32", "bfloat16"])
def test_parameters_of_any_dtype(weight, bias, dtype):
    x = draw(5, 150, dtype=dtype)
    parameters = [
        None if weight is None else draw(150, dtype=weight, seed=3),
        draw(150, dtype=dtype, seed=4) if bias else None,
    ]
    squares = sum_of_squares_reference(x)
    agree(partial(scaled, scale_kernel), partial(scaled, scale_reference), x, squares, *parameters)


@pytest.mark.parametrize("weight", [None, float32, bfloat16], ids=["no weight", "float32", "bfloat16"])
def test_rounding_after_every_step_where_the_norm_it_replaces_does(weight, dtype):
    """The same roundings as the twin's: apart only where the values before the first rounding are."""
    x = draw(5, 150, dtype=dtype)
    parameters = [None if weight is None else draw(150, dtype=weight, seed=3), draw(150, dtype=dtype, seed=4)]
    squares = sum_of_squares_reference(x)
    got = scaled(scale_kernel, x, squares, *parameters, round_first=True)
    own = scaled(scale_reference, x, squares, *parameters, round_first=True)
    exact = scaled(scale_reference, *(None if t is None else t.double() for t in (x, squares, *parameters)))
    check(got, own, exact)
    if got.dtype != float32:
        assert (got != own).sum() <= 0.01 * got.numel()


def test_one_huge_channel_in_bfloat16_keeps_the_small_ones():
    """4096 squares of 1 beside one of 2**16: bfloat16 would end at 2**16."""
    x = torch.ones(1, 4097, dtype=bfloat16)
    x[0, 0] = 256
    assert squares_kernel(x).item() == 2**16 + 4096


VIEWS = {
    "three dims": lambda x: x.reshape(3, 4, 150),
    "transposed": lambda x: x.t().contiguous().t(),
    "expanded": lambda x: x[:1].expand(12, -1),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_input_of_any_strides(view, dtype):
    x = view(draw(12, 150, dtype=dtype))
    agree(squares_kernel, sum_of_squares_reference, x)
    weight = draw(150, dtype=dtype, seed=3)
    agree(partial(scaled, scale_kernel), partial(scaled, scale_reference), x, squares_kernel(x), weight, None)


def test_both_halves_are_the_norm_of_the_whole_row(dtype):
    """Two ranks' channels, their squares summed, against the norm of the row."""
    x, weight = draw(5, 300, dtype=dtype), draw(300, dtype=dtype, seed=3)
    squares = squares_kernel(x[:, :150]) + squares_kernel(x[:, 150:])
    got = torch.cat(
        [scale_kernel(x[:, cut], squares, 300, 1e-5, weight[cut]) for cut in (slice(150), slice(150, 300))], -1
    )
    exact = rms_norm_reference(x.double(), 1e-5, weight.double())
    check(got, torch.nn.functional.rms_norm(x, (300,), weight, 1e-5), exact)


def test_gradients_are_those_of_the_twin():
    def loss(backend, x, weight):
        squares = sum_of_squares(x, backend=backend)
        return scale(x, squares, 150, 1e-5, weight, backend=backend).square().sum()

    agree_gradients(loss, draw(5, 150, dtype=float32), draw(150, dtype=float32, seed=3))
