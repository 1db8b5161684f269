"""ColwiseLinear and RowwiseLinear: outputs and every gradient are those of the unsharded linear layer.

Small integers are compared exactly: no order of summing rounds them. Random float32 may differ by 1e-6.
"""

from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from close import FLOAT32, randomise, relative_error
from test_collectives import Calls
from tp_layers.group import Group
from tp_layers.layers.linear import ColwiseLinear, RowwiseLinear
from tp_layers.plans.spec import ShardSpec
from tp_layers.plans.styles import PackedColwiseParallel, PackedRowwiseParallel, style_of

SIZES = [1, 2, 3, 4]
HALVES = [torch.bfloat16, torch.float16]
FUSED = [2, 1, 1, 3, 3]
# Layer, blocks, and the option of `from_linear`.
KINDS = {
    "colwise": (ColwiseLinear, None, {}),
    "colwise_three_to_one": (ColwiseLinear, [3, 1], {}),
    "colwise_qkv_and_gated_mlp": (ColwiseLinear, FUSED, {}),
    "colwise_gather": (ColwiseLinear, None, {"gather": True}),
    "colwise_gather_three_to_one": (ColwiseLinear, [3, 1], {"gather": True}),
    "rowwise": (RowwiseLinear, None, {}),
    "rowwise_three_to_one": (RowwiseLinear, [3, 1], {}),
    "rowwise_qkv_and_gated_mlp": (RowwiseLinear, FUSED, {}),
    "rowwise_split_input": (RowwiseLinear, None, {"split_input": True}),
    "rowwise_split_input_three_to_one": (RowwiseLinear, [3, 1], {"split_input": True}),
}
ROWWISE = [kind for kind, (layer, _, _) in KINDS.items() if layer is RowwiseLinear]
WHOLE_OUTPUT = [*ROWWISE, "colwise_gather", "colwise_gather_three_to_one"]

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


def integers(shape, seed, dtype=torch.float32):
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def noise(shape, seed, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def linear_for(kind, size, dtype=torch.float32, *, unit=5, other=7, bias=True, integer=True):
    """A full linear layer for `kind`: its sharded dim has `unit` rows of each proportion on each rank."""
    layer, blocks, _ = KINDS[kind]
    sharded = size * unit * sum(blocks or [1])
    wide, narrow = (other, sharded) if layer is ColwiseLinear else (sharded, other)
    linear = nn.Linear(wide, narrow, bias=bias, dtype=dtype)
    if not integer:
        return randomise(linear)
    with torch.no_grad():
        for seed, parameter in enumerate(linear.parameters()):
            parameter.copy_(integers(parameter.shape, seed))
    return linear


def sharded_linear(kind, linear, group):
    layer, blocks, options = KINDS[kind]
    return layer.from_linear(linear, group=group, blocks=blocks, **options)


def part(kind, spec, full, side, group):
    """What a rank holds of `full`, the layer's whole input or output (or its gradient)."""
    layer, _, options = KINDS[kind]
    split = (side == "input") == (layer is RowwiseLinear) and not options
    return ShardSpec(-1, spec.blocks).take(full, group.rank, group.size) if split else full


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


def exactly(got, wanted):
    return got.dtype == wanted.dtype and torch.equal(got, wanted)


def nearly(got, wanted):
    return relative_error(got, wanted) <= FLOAT32


def integer_case(linear, shape, strides="contiguous", how="plain"):
    dtype = linear.weight.dtype
    x, grad = (integers((*shape, n), 10, dtype) for n in (linear.in_features, linear.out_features))
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
        x, *grads = (noise((2, 9, n), seed, dtype) for seed, n in enumerate(widths))
        cases[str(dtype)] = Case(linear, x, grads)
    check_layers(ranks, size, kind, cases, nearly)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_float32_parameters_train_under_autocast(ranks, size, kind):
    linear = linear_for(kind, size, unit=2, other=3)
    x, grad = (integers((2, 4, n), 10).sign() for n in (linear.in_features, linear.out_features))
    # Ones: bfloat16 rounds no sum of up to 256 of them.
    linear.weight.data.sign_()
    cases = {"autocast": Case(linear, x, [grad.bfloat16()], how="autocast")}
    check_layers(ranks, size, kind, cases, exactly)


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
    return linear, noise((rows, linear.in_features), 1, dtype)


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
        x = noise((3, linear.in_features), 2, linear.weight.dtype)
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
        linear.bias.data.copy_(1000 * noise(linear.bias.shape, 1))
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
    cases = [(linear, noise((*shape, linear.in_features), 1, dtype)) for shape in shapes]
    # Here a flattened product has other bits.
    cases.append((linear, noise((9, 2, linear.in_features), 1, dtype).transpose(0, 1)))
    for found in [at_size_one(Group(), kind, cases), *ranks(1, at_size_one, kind, cases)]:
        for (plain, y, names), (_, x) in zip(found, cases, strict=True):
            wanted = F.linear(x, linear.weight, linear.bias)
            assert exactly(plain, wanted) and exactly(y, wanted)
            assert names == []


def count_collectives(group, kind, linear, x):
    layer = sharded_linear(kind, linear, group)
    leaf = part(kind, layer.spec, x, "input", group).requires_grad_()
    with Calls() as forward:
        y = layer(leaf)
    with Calls() as backward:
        y.sum().backward()
    return len(forward.names), len(backward.names)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_makes_one_collective_where_its_style_says_so(ranks, kind):
    layer, _, options = KINDS[kind]
    linear = linear_for(kind, 2)
    x = integers((3, linear.in_features), 1)
    forward = int(kind in WHOLE_OUTPUT)
    backward = int(layer is ColwiseLinear or "split_input" in options)
    assert ranks(2, count_collectives, kind, linear, x) == [(forward, backward)] * 2


def wrong_widths(group, linear):
    """The messages of a rowwise layer, and of one that splits its input, for widths they do not take."""
    messages = {}
    for name, layer, width in (
        ("whole_input", RowwiseLinear.from_linear(linear, group=group), 12),
        ("other_input", RowwiseLinear.from_linear(linear, group=group), 5),
        ("part_of_input", RowwiseLinear.from_linear(linear, group=group, split_input=True), 4),
    ):
        try:
            layer(torch.zeros(2, width))
            messages[name] = "accepted"
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_a_rowwise_layer_given_the_wrong_width_names_both(ranks):
    for messages in ranks(3, wrong_widths, nn.Linear(12, 5)):
        whole = messages["whole_input"]
        assert "takes 4 of 12 columns on each of 3 ranks, its input has 12" in whole and "rowwise_split_input" in whole
        other = messages["other_input"]
        assert "takes 4 of 12 columns" in other and "its input has 5" in other and "rowwise_split_input" not in other
        assert "takes 12 of 12 columns" in messages["part_of_input"] and "has 4" in messages["part_of_input"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_dim_that_the_size_does_not_divide_is_refused(kind):
    layer, blocks, options = KINDS[kind]
    linear = linear_for(kind, 2)
    with pytest.raises(ValueError, match="not divisible by 4 ranks"):
        layer.from_linear(linear, group=Group(3, 4), blocks=blocks, **options)
    with pytest.raises(ValueError, match="which does not divide"):
        layer.from_linear(linear, group=Group(1, 2), blocks=[67, 2], **options)


class GatedPair(nn.Module):
    """Fused q, k, v and a gated MLP -> one output projection of the attention's and the MLP's channels."""

    def __init__(self, size):
        super().__init__()
        self.width = 3 * size
        self.fused = nn.Linear(13, 7 * self.width)
        self.out = nn.Linear(3 * self.width, 11)
        randomise(self)

    def forward(self, x, size=1):
        q, k, v, gate, up = self.fused(x).split([part * self.width // size for part in (1, 1, 1, 2, 2)], -1)
        return self.out(torch.cat([q * torch.sigmoid(k) + v, F.silu(gate) * up], -1))


class PlainPair(nn.Module):
    """Up, GELU, down, as in a feed-forward block."""

    def __init__(self, size):
        super().__init__()
        self.fused, self.out = nn.Linear(13, 9 * size), nn.Linear(9 * size, 11)
        randomise(self)

    def forward(self, x, size=1):
        return self.out(F.gelu(self.fused(x)))


PAIRS = {"colwise_gelu_rowwise": (PlainPair, [1], [1]), "gated_parallel_block": (GatedPair, [1, 1, 1, 2, 2], [1, 2])}


def run_pair(group, model, blocks, x, grads):
    model.fused = ColwiseLinear.from_linear(model.fused, group=group, blocks=blocks[0])
    model.out = RowwiseLinear.from_linear(model.out, group=group, blocks=blocks[1])
    return forward_backward(model, x, grads, group.size)


def forward_backward(model, x, grads, size=1):
    leaf = x.clone().requires_grad_()
    for grad in grads:
        y = model(leaf, size)
        y.backward(grad)
    return y.detach(), leaf.grad, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("calls", [1, 2], ids=["one_backward", "two_backwards_accumulated"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("size", SIZES)
def test_a_pair_has_the_output_and_gradients_of_the_unsharded_pair(ranks, size, pair, calls):
    build, *blocks = PAIRS[pair]
    x = noise((2, 7, 13), 0)
    grads = [noise((2, 7, 11), 1 + call) for call in range(calls)]
    found = ranks(size, run_pair, build(size), blocks, x, grads)
    y, x_grad, wanted = forward_backward(build(size), x, grads)
    specs = {name: ShardSpec.of(0, grad.shape[0], blocks[0]) for name, grad in wanted.items() if "fused" in name}
    specs["out.weight"] = ShardSpec.of(1, wanted["out.weight"].shape[1], blocks[1])
    for rank, (output, leaf_grad, parameter_grads) in enumerate(found):
        assert nearly(output, y)
        assert nearly(leaf_grad, x_grad)
        for name, grad in parameter_grads.items():
            assert nearly(grad, specs[name].take(wanted[name], rank, size) if name in specs else wanted[name])
        # What is whole is whole to the bit: ranks that train stay equal.
        for got, first in ((output, found[0][0]), (leaf_grad, found[0][1])):
            assert torch.equal(got, first)
        assert torch.equal(parameter_grads["out.bias"], found[0][2]["out.bias"])


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", SIZES)
def test_a_layer_looks_like_a_linear_layer_and_holds_only_its_shard(size, kind, bias):
    linear = linear_for(kind, size, bias=bias)
    full = {name: value.clone() for name, value in linear.state_dict().items()}
    for rank in range(size):
        layer = sharded_linear(kind, linear, Group(rank, size))
        assert not isinstance(layer, nn.Linear)
        assert list(layer.state_dict()) == (["weight", "bias"] if bias else ["weight"])
        assert (layer.bias is not None) == bias
        spec = layer.spec
        assert exactly(layer.weight.detach(), spec.take(full["weight"], rank, size))
        assert layer.weight.untyped_storage().nbytes() == full["weight"].nbytes // size
        if bias:
            whole = isinstance(layer, RowwiseLinear)
            assert exactly(layer.bias.detach(), full["bias"] if whole else spec.take(full["bias"], rank, size))
        inputs = part(kind, spec, torch.zeros(1, linear.in_features), "input", layer.group)
        outputs = part(kind, spec, torch.zeros(1, linear.out_features), "output", layer.group)
        assert (layer.in_features, layer.out_features) == (inputs.shape[1], outputs.shape[1])
        text = repr(layer)
        assert f"in_features={inputs.shape[1]}, out_features={outputs.shape[1]}, bias={bias}" in text
        assert f"rank {rank} of {size}, dim {spec.dim} of {spec.length}" in text
        assert (str(spec.blocks) in text) == (len(spec.blocks) > 1)
    for name, value in linear.state_dict().items():
        assert exactly(value, full[name])


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_stay_frozen_and_dtypes_stay(kind):
    for dtype in (torch.float32, torch.bfloat16):
        linear = linear_for(kind, 2, dtype)
        linear.weight.requires_grad_(False)
        layer = sharded_linear(kind, linear, Group(1, 2))
        assert (layer.weight.requires_grad, layer.bias.requires_grad) == (False, True)
        assert layer.weight.dtype == layer.bias.dtype == dtype


STYLES = {
    "colwise": ("colwise", "colwise"),
    "colwise_gather": ("colwise_gather", "colwise_gather"),
    "packed_colwise": (PackedColwiseParallel(FUSED), "colwise_qkv_and_gated_mlp"),
    "rowwise": ("rowwise", "rowwise"),
    "rowwise_split_input": ("rowwise_split_input", "rowwise_split_input"),
    "packed_rowwise": (PackedRowwiseParallel(FUSED), "rowwise_qkv_and_gated_mlp"),
}


@pytest.mark.parametrize(("style", "kind"), STYLES.values(), ids=STYLES)
def test_a_style_of_a_plan_builds_the_layer_of_its_name(style, kind):
    linear = linear_for(kind, 2)
    layer = style_of(style).shard(linear, Group(1, 2))
    wanted = sharded_linear(kind, linear, Group(1, 2))
    assert type(layer) is type(wanted) and layer.spec == wanted.spec and repr(layer) == repr(wanted)
    for option in ("gather", "split_input"):
        assert getattr(layer, option, None) == getattr(wanted, option, None)
    for name, value in wanted.state_dict().items():
        assert exactly(layer.state_dict()[name], value)
