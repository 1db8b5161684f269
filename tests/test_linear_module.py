"""A sharded linear layer as a module: its parameters, options and collectives, and the widths it refuses."""

import pytest
import torch
from torch import nn

from calls import Calls
from close import exactly
from linears import FUSED, KINDS, SIZES, WHOLE_OUTPUT, linear_for, part, sharded_linear
from seeded import integers
from tp_layers.group import Group
from tp_layers.layers.linear import ColwiseLinear, RowwiseLinear
from tp_layers.plans.styles import PackedColwiseParallel, PackedRowwiseParallel, style_of


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
    x = integers(3, linear.in_features, seed=1, most=4)
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
