"""The operations on one rank: against plain torch, exactly where the arithmetic is the same, else in float64."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

import seeded
from close import FLOAT32, relative_error
from tp_layers.kernels.colwise import colwise, colwise_reference
from tp_layers.kernels.rms_norm import rms_norm_reference, scale, sum_of_squares
from tp_layers.kernels.rowwise import rowwise, rowwise_reference

noise = partial(seeded.noise, dtype=torch.float64)
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
LEADING = {"one_row": (1,), "no_rows": (0,), "no_batch_dim": (), "odd_rows": (5,), "five_dims": (2, 1, 3, 2)}


def layouts(k):
    """Inputs `[.., k]` of every kind of strides."""
    return {
        **{name: noise(*shape, k) for name, shape in LEADING.items()},
        "transposed": noise(k, 5).t(),
        "permuted": noise(2, 5, k).transpose(0, 1),
        "all_dims_reversed": noise(k, 3, 2).permute(2, 1, 0),
        "expanded": noise(1, 1, k).expand(3, 4, k),
        "sliced_rows": noise(3, 9, k)[:, 1:5],
        "sliced_columns": noise(3, 4, k + 3)[..., 2:-1],
        "every_other_column": noise(3, 4, 2 * k)[..., ::2],
    }


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("layout", layouts(1))
def test_projections_are_the_linear_function_to_the_bit(layout, bias, dtype):
    x, weight = layouts(11)[layout].to(dtype), noise(7, 11, seed=1, dtype=dtype)
    bias = noise(7, seed=2, dtype=dtype) if bias else None
    wanted = F.linear(x, weight, bias)
    for operation in (colwise, colwise_reference, rowwise, rowwise_reference):
        assert torch.equal(operation(x, weight, bias), wanted)


@pytest.mark.parametrize("grad", [False, True], ids=["no_graph", "graph"])
@pytest.mark.parametrize("layout", layouts(1))
def test_rowwise_is_contiguous_and_adds_the_bias_only_when_told(layout, grad):
    x, weight, bias = layouts(11)[layout], noise(7, 11, seed=1).requires_grad_(grad), noise(7, seed=2)
    with_bias, without = rowwise(x, weight, bias, add_bias=True), rowwise(x, weight, bias, add_bias=False)
    assert torch.equal(with_bias, F.linear(x, weight, bias)) and torch.equal(rowwise(x, weight, bias), with_bias)
    assert torch.equal(without, F.linear(x, weight))
    assert with_bias.is_contiguous() and without.is_contiguous()
    assert with_bias.requires_grad == grad and without.requires_grad == grad


@pytest.mark.parametrize("layout", layouts(1))
def test_gradients_are_those_of_the_plain_expression(layout):
    # Small integers: no order of summing rounds them.
    x, weight, bias = ((4 * tensor).round() for tensor in (layouts(11)[layout], noise(7, 11, seed=1), noise(7, seed=2)))
    grad = (4 * noise(*x.shape[:-1], 7, seed=3)).round()

    def gradients(operation):
        leaves = [tensor.detach().requires_grad_() for tensor in (x, weight, bias)]
        operation(*leaves).backward(grad)
        return [leaf.grad for leaf in leaves]

    wanted = gradients(lambda x, weight, bias: x @ weight.t() + bias)
    for operation in (colwise, rowwise, lambda *tensors: rowwise(*tensors, add_bias=False)):
        assert all(map(torch.equal, gradients(operation), wanted))


def test_rowwise_passes_a_numerical_check_of_its_gradient():
    tensors = [tensor.requires_grad_() for tensor in (noise(2, 3, 5), noise(4, 5, seed=1), noise(4, seed=2))]
    assert torch.autograd.gradcheck(rowwise, tensors)
    assert torch.autograd.gradcheck(lambda x, weight: rowwise(x, weight), tensors[:2])


@pytest.mark.parametrize("wanted", ["x", "weight", "bias", "x weight", "x bias", "weight bias"])
@pytest.mark.parametrize("add_bias", [True, False], ids=["bias_added", "bias_left_out"])
def test_rowwise_gives_the_gradients_that_are_asked_for(wanted, add_bias):
    tensors = {"x": noise(3, 5), "weight": noise(4, 5, seed=1), "bias": noise(4, seed=2)}
    for name in wanted.split():
        tensors[name].requires_grad_()
    rowwise(*tensors.values(), add_bias).sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == wanted.split()
    if "bias" in wanted:
        assert tensors["bias"].grad.tolist() == [3.0] * 4


@pytest.mark.parametrize("add_bias", [True, False], ids=["bias_added", "bias_left_out"])
def test_rowwise_sums_the_bias_gradient_of_many_rows_before_it_rounds(add_bias):
    # 1000 rows of ones: bfloat16 counts them one by one up to 256.
    x, weight = torch.zeros(1000, 3, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.bfloat16)
    bias = torch.zeros(2, dtype=torch.bfloat16, requires_grad=True)
    rowwise(x, weight, bias, add_bias).sum().backward()
    assert bias.grad.dtype == torch.bfloat16 and bias.grad.tolist() == [1000.0, 1000.0]


def test_rowwise_refuses_widths_that_differ():
    with pytest.raises(ValueError, match="x has 6 columns, the weight 5"):
        rowwise(torch.zeros(2, 6), torch.zeros(4, 5))


PARTS = {"one_rank": [24], "two_ranks": [12, 12], "uneven_parts": [1, 5, 18]}


def normalised(x, parts, eps, weight=None, bias=None, **options):
    """The two halves, as ranks that hold `parts` of the channels would run them, their sums added up."""
    squares = sum(sum_of_squares(part) for part in x.split(parts, -1))
    cuts = ([None] * len(parts) if tensor is None else tensor.split(parts) for tensor in (weight, bias))
    return torch.cat(
        [
            scale(part, squares, x.shape[-1], eps, part_weight, part_bias, **options)
            for part, part_weight, part_bias in zip(x.split(parts, -1), *cuts, strict=True)
        ],
        -1,
    )


AFFINE = {"plain": (False, False), "weight": (True, False), "weight_and_bias": (True, True), "bias": (False, True)}


@pytest.mark.parametrize("affine", AFFINE.values(), ids=AFFINE)
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("layout", layouts(1))
def test_the_halves_of_rms_norm_make_the_norm(layout, parts, affine):
    x, eps = layouts(24)[layout], 0.125
    weight, bias = (noise(24, seed=seed) if used else None for seed, used in enumerate(affine, 1))
    reference = rms_norm_reference(x, eps, weight, bias)
    if bias is None:
        assert relative_error(reference, F.rms_norm(x, (24,), weight, eps)) <= 1e-15
    got = normalised(x, parts, eps, weight, bias)
    assert got.dtype == torch.float64 and relative_error(got, reference) <= 1e-15
    single = normalised(x.float(), parts, eps, *(None if t is None else t.float() for t in (weight, bias)))
    assert single.dtype == torch.float32 and relative_error(single, reference) <= FLOAT32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_a_half_precision_norm_is_as_exact_as_torch_s_own(parts, dtype):
    x, weight = noise(50, 24, dtype=dtype), noise(24, seed=1, dtype=dtype)
    exact = rms_norm_reference(x.double(), 1e-6, weight.double())
    own = relative_error(F.rms_norm(x, (24,), weight, 1e-6), exact)
    got = normalised(x, parts, 1e-6, weight)
    assert got.dtype == dtype
    assert relative_error(got, exact) <= 2 * own + torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("layout", layouts(1))
def test_squares_are_summed_in_float32_or_wider(layout, dtype):
    # Small integers, whose squares no sum in float32 rounds.
    x = (4 * layouts(24)[layout]).round().to(dtype)
    squares = sum_of_squares(x)
    assert squares.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert squares.shape == (*x.shape[:-1], 1) and squares.is_contiguous()
    assert torch.equal(squares.double(), x.double().pow(2).sum(-1, keepdim=True))


def test_a_long_row_and_a_large_value_keep_their_squares():
    assert sum_of_squares(torch.ones(1, 4099, dtype=torch.bfloat16)).item() == 4099
    assert sum_of_squares(torch.full((1, 2), 300.0, dtype=torch.float16)).item() == 180000


def test_the_value_is_rounded_first_only_when_told_and_only_before_a_weight():
    x, weight = noise(64, 24, dtype=torch.bfloat16), noise(24, seed=1, dtype=torch.bfloat16)
    squares = sum_of_squares(x)
    value = x.float() * torch.rsqrt(squares / 24 + 1e-6)
    once, first = (scale(x, squares, 24, 1e-6, weight, round_first=told) for told in (False, True))
    assert torch.equal(once, (value * weight.float()).bfloat16())
    assert torch.equal(first, value.bfloat16() * weight)
    assert not torch.equal(once, first)
    assert torch.equal(scale(x, squares, 24, 1e-6, round_first=True), value.bfloat16())


def test_the_result_has_the_dtype_of_the_norm_it_stands_for():
    x, squares = torch.ones(2, 4, dtype=torch.bfloat16), torch.ones(2, 1)
    wide = torch.ones(4)
    assert scale(x, squares, 4, 1e-6, wide).dtype == torch.bfloat16
    assert scale(x, squares, 4, 1e-6, wide, round_first=True).dtype == torch.float32
    assert scale(x.float(), squares, 4, 1e-6, wide.bfloat16()).dtype == torch.float32
    assert scale(x.float(), squares, 4, 1e-6, wide.bfloat16(), round_first=True).dtype == torch.bfloat16


def test_every_argument_of_scale_changes_the_result():
    x = noise(3, 24)
    arguments = {"squares": sum_of_squares(x), "width": 24, "eps": 1e-6, "weight": noise(24), "bias": noise(24, seed=1)}
    whole = scale(x, **arguments)
    for name, other in (
        ("squares", arguments["squares"] * 2),
        ("width", 48),
        ("eps", 0.1),
        ("weight", None),
        ("bias", None),
    ):
        assert not torch.equal(scale(x, **{**arguments, name: other}), whole), name


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_halves_pass_a_numerical_check_of_their_gradient(parts):
    tensors = [noise(3, 24).requires_grad_(), noise(24, seed=1).requires_grad_(), noise(24, seed=2).requires_grad_()]
    assert torch.autograd.gradcheck(lambda x, weight, bias: normalised(x, parts, 1e-6, weight, bias), tensors)
