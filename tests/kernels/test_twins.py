"""The torch twins: bit-exact where the unsharded layer is one F.linear, every argument heeded, wrong ones refused."""

import pytest
import torch
import torch.nn.functional as F

from tp_layers.kernels.colwise import ACTIVATIONS, colwise, colwise_blocks
from tp_layers.kernels.gated import gated_colwise
from tp_layers.kernels.rowwise import rowwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["float32", "bfloat16", "float16"]


def layer(dtype=torch.float32, width=12, depth=10):
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 5, depth), (width, depth), (width,)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_the_bare_projections_are_f_linear_on_the_inputs_own_shape(dtype):
    x, weight, bias = layer(dtype)
    for b in (bias, None):
        assert torch.equal(rowwise(x, weight, b, backend="torch"), F.linear(x, weight, b))
        assert torch.equal(colwise(x, weight, b, backend="torch"), F.linear(x, weight, b))
    assert torch.equal(rowwise(x, weight, bias, False, backend="torch"), F.linear(x, weight))


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
def test_packed_and_gated_twins_are_bit_exact_too(dtype):
    x, weight, bias = layer(dtype)
    y = F.linear(x, weight, bias)
    assert torch.equal(rowwise(x.split([4, 1, 5], -1), weight, bias, backend="torch"), y)
    ranges, names = [(0, 3), (3, 12)], [None, "gelu"]
    first, second = y[..., :3], F.gelu(y[..., 3:])
    assert torch.equal(colwise(x, weight, bias, ranges=ranges, activations=names), torch.cat([first, second], -1))
    separate = colwise_blocks(x, weight, bias, ranges=ranges, activations=names)
    assert torch.equal(separate[0], first) and torch.equal(separate[1], second)
    assert all(part.is_contiguous() for part in separate)
    for name, function in ACTIVATIONS.items():
        gate, up = y.chunk(2, -1)
        assert torch.equal(gated_colwise(x, weight, bias, activation=name), function(gate) * up)
        assert torch.equal(gated_colwise(x, weight, bias, activation=name, gate_first=False), function(up) * gate)


def test_rows_and_columns_of_a_full_weight():
    # Small integers, whose sums are exact in any order.
    x, weight, bias = (tensor.mul(4).round() for tensor in layer())
    rows = [(6, 8), (1, 4)]
    cut, cut_bias = torch.cat([weight[6:8], weight[1:4]]), torch.cat([bias[6:8], bias[1:4]])
    assert torch.equal(colwise(x, weight, bias, ranges=rows), F.linear(x, cut, cut_bias))
    columns = [(6, 8, 0), (1, 4, 2)]
    y = F.linear(x[..., :5], torch.cat([weight[:, 6:8], weight[:, 1:4]], 1), bias)
    assert torch.equal(rowwise(x[..., :5], weight, bias, ranges=columns), y)
    halves = gated_colwise(x, weight, bias, ranges=[(0, 2), (6, 8)])
    pair = F.linear(x, torch.cat([weight[:2], weight[6:8]]), torch.cat([bias[:2], bias[6:8]])).chunk(2, -1)
    assert torch.equal(halves, F.silu(pair[0]) * pair[1])


@pytest.mark.parametrize("rows", [[(0, 3), (3, 12)], [(2, 4), (4, 9)], [(4, 6)]], ids=["all", "some", "one"])
@pytest.mark.parametrize("activations", [None, "gelu"])
def test_rows_that_follow_each_other_are_one_gemm_and_its_views(rows, activations):
    x, weight, bias = (tensor.mul(4).round() for tensor in layer())
    names = None if activations is None else [None] * (len(rows) - 1) + [activations]
    ys = colwise_blocks(x, weight, bias, ranges=rows, activations=names, contiguous=False)
    for y, (start, stop), name in zip(ys, rows, names or [None] * len(rows), strict=True):
        wanted = F.linear(x, weight[start:stop], bias[start:stop])
        # GELU's last bits depend on strides.
        assert torch.equal(y, wanted) if name is None else torch.allclose(y, F.gelu(wanted), rtol=1e-5, atol=1e-5)
    if names is None:
        storage = ys[0].untyped_storage()
        assert {y.untyped_storage().data_ptr() for y in ys} == {storage.data_ptr()}
        assert storage.nbytes() == 4 * 15 * (rows[-1][1] - rows[0][0])
    apart = colwise_blocks(x, weight, bias, ranges=[(4, 6), (0, 2)], contiguous=False)
    assert torch.equal(apart[1], F.linear(x, weight[:2], bias[:2]))
    gate, up = F.linear(x, weight[2:8], bias[2:8]).chunk(2, -1)
    assert torch.equal(gated_colwise(x, weight, bias, ranges=[(2, 5), (5, 8)]), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_the_callers_buffer_is_written_in_place_and_nothing_beside_it(with_bias, dtype):
    x, weight, bias = layer(dtype)
    bias = bias if with_bias else None
    buffer = torch.full((3, 5, 20), -1.0, dtype=dtype)
    out = buffer[..., 4:16]
    assert rowwise(x, weight, bias, out=out, backend="torch") is out
    assert torch.allclose(out, F.linear(x, weight, bias), rtol=torch.finfo(dtype).eps)
    assert bool((buffer[..., :4] == -1).all()) and bool((buffer[..., 16:] == -1).all())


def test_float32_results_of_half_inputs_are_not_rounded():
    x, weight, bias = layer(torch.bfloat16)
    y = rowwise(x, weight, bias, out_dtype=torch.float32, backend="torch")
    assert y.dtype == torch.float32
    assert torch.equal(y, F.linear(x.float(), weight.float(), bias.float()))
    assert not torch.equal(y.bfloat16().float(), y)


def test_a_bias_of_another_dtype():
    x, weight, bias = layer(torch.bfloat16)
    assert torch.equal(rowwise(x, weight, bias.float()), F.linear(x, weight, bias))
    assert torch.equal(colwise(x, weight, bias.float()), F.linear(x, weight, bias))


def test_packed_rowwise_gradients_are_the_cats():
    x, weight, bias = (tensor.double().requires_grad_() for tensor in layer())
    rowwise((x[..., :4], x[..., 4:]), weight, bias, add_bias=False).square().sum().backward()
    got = [x.grad, weight.grad]
    x.grad = weight.grad = None
    F.linear(x, weight).square().sum().backward()
    assert all(torch.allclose(a, b) for a, b in zip(got, (x.grad, weight.grad), strict=True))
    assert torch.allclose(bias.grad, 2 * F.linear(x, weight).sum((0, 1)))


X, W, B = layer()
REFUSED = {
    "widths": (lambda: rowwise(X, W[:, 1:]), "x has 10 columns, the weight 9"),
    "widths of several": (lambda: rowwise((X, X), W), "x has 20 columns, the weight 10"),
    "ranges of other widths": (lambda: rowwise(X, W, ranges=[(0, 3)]), "x has"),
    "ranges outside": (lambda: rowwise(X[..., :2], W, ranges=[(9, 11)]), "the weight's 10 columns"),
    "no ranges": (lambda: colwise(X, W, ranges=[]), "the weight's 12 rows"),
    "buffer's shape": (lambda: rowwise(X, W, out=torch.empty(15, 12)), "out is"),
    "buffer's dtype": (
        lambda: rowwise(X, W, out=torch.empty(3, 5, 12), out_dtype=torch.bfloat16),
        "out is torch.float32",
    ),
    "buffer under autograd": (
        lambda: rowwise(X, W.clone().requires_grad_(), out=torch.empty(3, 5, 12)),
        "not differentiable",
    ),
    "unknown activation": (lambda: colwise(X, W, activations=["relu"]), "each None or one of gelu"),
    "too few activations": (lambda: colwise(X, W, ranges=[(0, 6), (6, 12)], activations=["gelu"]), "2 blocks"),
    "unknown gate": (lambda: gated_colwise(X, W, activation="relu"), "'relu' is not one of"),
    "odd halves": (lambda: gated_colwise(X, W[:11]), "not two equal blocks"),
    "unequal blocks of a gate": (lambda: gated_colwise(X, W, ranges=[(0, 3), (3, 12)]), "two blocks of equal width"),
}


@pytest.mark.parametrize(("call", "message"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
