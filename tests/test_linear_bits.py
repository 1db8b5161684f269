"""How a sharded linear layer rounds: alike on every rank, as torch at size one, near one device in half dtypes."""

import pytest
import torch
import torch.nn.functional as F

from calls import Calls
from close import exactly, relative_error
from linears import KINDS, SIZES, WHOLE_OUTPUT, linear_for, part, sharded_linear
from seeded import noise
from tp_layers.group import Group

HALVES = [torch.bfloat16, torch.float16]


def outputs(group, kind, cases):
    """For each (linear, x): its output, that of -x, the first one again, and whether the first was left alone."""
    found = []
    for linear, x in cases:
        layer = sharded_linear(kind, linear, group)
        given = part(kind, layer.spec, x, "input", group)
        with torch.no_grad():
            first = layer(given)
            kept = first.clone()
            negated = layer(given * -1)
            found.append((first, negated, layer(given), torch.equal(first, kept)))
    return found


def random_case(kind, size, dtype, rows, **widths):
    linear = linear_for(kind, size, dtype, integer=False, **widths)
    return linear, noise(rows, linear.in_features, seed=1, dtype=dtype)


@pytest.mark.parametrize("kind", WHOLE_OUTPUT)
@pytest.mark.parametrize("size", SIZES)
def test_whole_outputs_are_the_same_bits_on_every_rank_and_in_every_call(ranks, size, kind):
    cases = [random_case(kind, size, dtype, 19, unit=7, other=131, bias=False) for dtype in (torch.float32, *HALVES)]
    found = ranks(size, outputs, kind, cases)
    for of_rank in found:
        for (first, negated, again, kept), (of_rank_0, *_) in zip(of_rank, found[0], strict=True):
            assert kept, "a result changed when the next one was made"
            assert torch.equal(first, of_rank_0) and torch.equal(again, first)
            # Rounding is symmetric.
            assert torch.equal(negated, -first)


@pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["rowwise", "rowwise_split_input"])
@pytest.mark.parametrize("size", SIZES)
def test_half_precision_errs_at_most_three_times_as_much_as_one_device(ranks, size, kind, dtype):
    linear, x = random_case(kind, size, dtype, 50, unit=960 // size, other=64)
    with torch.no_grad():
        exact = F.linear(x.double(), linear.weight.double(), linear.bias.double())
        one_device = relative_error(linear(x), exact)
    for ((got, *_),) in ranks(size, outputs, kind, [(linear, x)]):
        assert relative_error(got, exact) <= 3 * one_device


def biases(group, kind, linears):
    """For each layer its output without a graph, with one, with a graph of the input alone, and in inference mode."""
    found = []
    for linear in linears:
        layer = sharded_linear(kind, linear, group)
        x = noise(3, linear.in_features, seed=2, dtype=linear.weight.dtype)
        given = part(kind, layer.spec, x, "input", group)
        with torch.no_grad():
            plain = layer(given)
        with_graph = layer(given).detach()
        layer.requires_grad_(False)
        frozen = layer(given.requires_grad_()).detach()
        with torch.inference_mode():
            found.append((plain, with_graph, frozen, layer(given)))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_large_bias_is_added_exactly_once_on_every_path_in_every_dtype(ranks, size, kind):
    linears = [linear_for(kind, size, dtype, other=131) for dtype in (torch.float32, *HALVES)]
    for linear in linears:
        linear.weight.data.zero_()
        linear.bias.data.copy_(1000 * noise(*linear.bias.shape, seed=1))
    for rank, found in enumerate(ranks(size, biases, kind, linears)):
        group = Group(rank, size)
        for linear, of_paths in zip(linears, found, strict=True):
            spec = sharded_linear(kind, linear, group).spec
            wanted = part(kind, spec, linear.bias.detach().expand(3, -1), "output", group)
            assert [exactly(got, wanted) for got in of_paths] == [True] * 4, linear.weight.dtype


def at_size_one(group, kind, cases):
    """For each (linear, x) the outputs without and with a graph, and the collectives of a forward and backward."""
    found = []
    for linear, x in cases:
        layer = sharded_linear(kind, linear, group)
        leaf = x.clone().requires_grad_()
        with Calls() as calls:
            with torch.no_grad():
                plain = layer(leaf)
            y = layer(leaf)
            y.sum().backward()
        found.append((plain, y.detach(), calls.names))
    return found


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALVES], ids=["float64", "float32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
def test_size_one_is_the_linear_layer_bit_for_bit_without_a_collective(ranks, kind, dtype):
    linear = linear_for(kind, 1, dtype, unit=31, other=67, integer=False)
    shapes = ((1,), (0,), (7,), (2, 9), (2, 3, 1, 5))
    cases = [(linear, noise(*shape, linear.in_features, seed=1, dtype=dtype)) for shape in shapes]
    # Here a flattened product has other bits.
    cases.append((linear, noise(9, 2, linear.in_features, seed=1, dtype=dtype).transpose(0, 1)))
    for found in [at_size_one(Group(), kind, cases), *ranks(1, at_size_one, kind, cases)]:
        for (plain, y, names), (_, x) in zip(found, cases, strict=True):
            wanted = F.linear(x, linear.weight, linear.bias)
            assert exactly(plain, wanted) and exactly(y, wanted)
            assert names == []
