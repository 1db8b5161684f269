"""ColwiseLinear and RowwiseLinear: outputs and every gradient are those of the unsharded linear layer.

Small integers are compared exactly: no order of summing rounds them. Random float32 may differ by 1e-6.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from close import exactly, nearly
from linears import KINDS, SIZES, linear_for, part, sharded_linear
from seeded import integers, noise
from tp_layers.group import Group
from tp_layers.layers.linear import RowwiseLinear

# The dims before the last of an input, and the strides it has.
ROWS = {
    "one_row": ((1,), "contiguous"),
    "no_rows": ((0,), "contiguous"),
    "no_batch_dim": ((), "contiguous"),
    "odd_rows": ((5,), "contiguous"),
    "five_dims": ((2, 1, 3, 2), "contiguous"),
    "five_dims_no_rows": ((2, 0, 3, 2), "contiguous"),
    "transposed": ((5,), "transposed"),
    "permuted": ((2, 3), "transposed"),
    "expanded": ((3, 4), "expanded"),
    "sliced_rows": ((3, 4), "sliced_rows"),
    "sliced_columns": ((3, 4), "sliced_columns"),
    "every_other_column": ((2, 1, 3, 2), "every_other_column"),
}


def with_strides(x, strides):
    """`x` with other strides, differentiable; "expanded" repeats its first entry."""
    if strides == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if strides == "expanded":
        return x[:1, :1].expand_as(x)
    if strides == "sliced_rows":
        return torch.cat([x, x + 1], 1)[:, : x.shape[1]]
    if strides == "sliced_columns":
        return F.pad(x, (1, 2), value=9.0)[..., 1:-2]
    if strides == "every_other_column":
        return torch.stack([x, x + 1], -1).flatten(-2)[..., ::2]
    return x


def call(layer, x, how):
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        y = layer(x)
    return y.mul_(2).add_(1) if how == "changed_in_place" else y


class Case(NamedTuple):
    """One use of a layer: a backward call for each of `grads`, on an input with these strides, `how` as in `call`."""

    linear: nn.Linear
    x: torch.Tensor
    grads: list
    strides: str = "contiguous"
    how: str = "plain"


def use_layers(group, kind, cases):
    """For each case the outputs without and with a graph, and the gradients of the input and of the parameters."""
    found = {}
    for name, case in cases.items():
        layer = sharded_linear(kind, case.linear, group)
        # A whole bias is the linear layer's own, which several cases use.
        layer.zero_grad()
        leaf = part(kind, layer.spec, case.x, "input", group).requires_grad_()
        grads = [part(kind, layer.spec, grad, "output", group) for grad in case.grads]
        with torch.no_grad():
            plain = call(layer, with_strides(leaf, case.strides), case.how)
        found[name] = plain, *backward(layer, leaf, grads, case)
    return found


def backward(layer, leaf, grads, case):
    for grad in grads:
        y = call(layer, with_strides(leaf, case.strides), case.how)
        y.backward(grad)
    return y.detach(), leaf.grad, {name: parameter.grad for name, parameter in layer.named_parameters()}


def whole_layers(cases):
    """The same of the unsharded layers: output, and the gradients."""
    found = {}
    for name, case in cases.items():
        case.linear.zero_grad()
        found[name] = backward(case.linear, case.x.clone().requires_grad_(), case.grads, case)
    return found


def check_layers(ranks, size, kind, cases, same):
    """Compares every rank's output and gradients with its part of the unsharded layer's, by `same(got, wanted)`."""
    wanted = whole_layers(cases)
    for rank, found in enumerate(ranks(size, use_layers, kind, cases)):
        group = Group(rank, size)
        for name, case in cases.items():
            layer = sharded_linear(kind, case.linear, group)
            spec, (y, x_grad, full_grads) = layer.spec, wanted[name]
            plain, output, leaf_grad, grads = found[name]
            assert same(plain, part(kind, spec, y, "output", group)), name
            assert torch.equal(output, plain), name
            assert same(leaf_grad, part(kind, spec, x_grad, "input", group)), name
            assert grads.keys() == full_grads.keys(), name
            for key, full_grad in full_grads.items():
                whole = key == "bias" and isinstance(layer, RowwiseLinear)
                assert same(grads[key], full_grad if whole else spec.take(full_grad, rank, size)), (name, key)


def integer_case(linear, shape, strides="contiguous", how="plain"):
    dtype = linear.weight.dtype
    x, grad = (integers(*shape, n, seed=10, most=4, dtype=dtype) for n in (linear.in_features, linear.out_features))
    return Case(linear, x, [grad], strides, how)


USES = {"plain": torch.float32, "changed_in_place": torch.float64}


@pytest.mark.parametrize("how", USES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_integers_in_inputs_of_any_shape_and_strides_are_exact(ranks, size, kind, how):
    linear = linear_for(kind, size, USES[how])
    cases = {name: integer_case(linear, *rows, how=how) for name, rows in ROWS.items()}
    check_layers(ranks, size, kind, cases, exactly)


WIDTHS = {
    "no_bias": {"bias": False},
    "one_column_on_each_rank": {"unit": 1},
    "other_dim_of_one": {"other": 1},
    "one_by_one_without_bias": {"unit": 1, "other": 1, "bias": False},
    "wide": {"unit": 33, "other": 129},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_integers_are_exact_at_every_width(ranks, size, kind):
    cases = {name: integer_case(linear_for(kind, size, **widths), (3, 2)) for name, widths in WIDTHS.items()}
    check_layers(ranks, size, kind, cases, exactly)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_random_numbers_and_accumulated_gradients_are_within_a_float32_error(ranks, size, kind):
    cases = {}
    for dtype in (torch.float32, torch.float64):
        linear = linear_for(kind, size, dtype, unit=17, other=61, integer=False)
        widths = linear.in_features, linear.out_features, linear.out_features
        x, *grads = (noise(2, 9, n, seed=seed, dtype=dtype) for seed, n in enumerate(widths))
        cases[str(dtype)] = Case(linear, x, grads)
    check_layers(ranks, size, kind, cases, nearly)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_float32_parameters_train_under_autocast(ranks, size, kind):
    linear = linear_for(kind, size, unit=2, other=3)
    x, grad = (integers(2, 4, n, seed=10, most=4).sign() for n in (linear.in_features, linear.out_features))
    # Ones: bfloat16 rounds no sum of up to 256 of them.
    linear.weight.data.sign_()
    cases = {"autocast": Case(linear, x, [grad.bfloat16()], how="autocast")}
    check_layers(ranks, size, kind, cases, exactly)
