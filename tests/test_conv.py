"""Sharded convolutions: outputs, strides and every gradient of the unsharded ones, exact in small integers."""

import copy
import pickle

import pytest
import torch
from torch import nn

from convs import CASES, CHANNELS, GATED, INNER, OUT, Gated, build, inputs
from small_models import cut, small_integers
from tp_layers import ColwiseConv, DepthwiseConv, RowwiseConv, apply, describe, verify
from tp_layers.describe import Collective
from tp_layers.group import Group

cases = pytest.mark.parametrize("case", CASES)
ORDERS = {"contiguous": (2,), "channels_last": (2,), "sliced": (2,), "without_a_batch": (), "of_none": (0,)}


def train(model, x):
    """The output and the gradients of the input and of all parameters."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(small_integers(*y.shape, seed=200))
    return y.detach(), x.grad, {key: parameter.grad for key, parameter in model.named_parameters()}


def compare(group, case, extents, orders=("contiguous",), change=lambda model: model):
    """What differs from the unsharded model by a single bit, or in its strides."""
    whole, wrong = build(case, extents), []
    model = change(apply(build(case, extents), CASES[case][1], group=group))
    for order in orders:
        x = inputs(extents, order, ORDERS[order])
        y, x_grad, grads = train(whole, x)
        got, got_x_grad, got_grads = train(model, x)
        wrong += [] if torch.equal(got, y) and got.stride() == y.stride() else [f"{order}: the output"]
        wrong += [] if torch.equal(got_x_grad, x_grad) else [f"{order}: the gradient of the input"]
        for key, grad in grads.items():
            dim, blocks = CASES[case][2].get(key, (0, [len(grad)]))
            mine = cut(grad, dim, blocks, group.rank, group.size) if key in CASES[case][2] else grad
            same = torch.equal(got_grads[key], mine) and (grad.count_nonzero() or not len(x))
            wrong += [] if same else [f"{order}: {key}"]
    return wrong


@cases
@pytest.mark.parametrize("extents", [1, 2, 3], ids=lambda extents: f"{extents}d")
@pytest.mark.parametrize("size", [1, 2, 4])
def test_outputs_and_all_gradients_equal_the_unsharded_model(ranks, case, extents, size):
    assert ranks(size, compare, case, extents, [*ORDERS]) == [[]] * size


def twice(model):
    return copy.deepcopy(copy.deepcopy(model))


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def compiled(model):
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    return model


@cases
def test_copied_pickled_and_compiled_it_is_the_same(ranks, case):
    assert compare(Group(), case, 2, change=pickled) == []
    for change in (twice, compiled):
        assert ranks(2, compare, case, 2, ["contiguous", "channels_last"], change) == [[], []]


def in_place(group, case, extents):
    """With full weights left where they are: equal, and refused where gradients are wanted."""
    whole, model = build(case, extents), build(case, extents)
    before = {key: parameter.data_ptr() for key, parameter in model.named_parameters()}
    apply(model, CASES[case][1], group=group, copy=False)
    assert before == {key: parameter.data_ptr() for key, parameter in model.named_parameters()}
    with torch.no_grad():
        same = torch.equal(model(inputs(extents)), whole(inputs(extents)))
    with pytest.raises(ValueError, match="copy=False is for inference"):
        model(inputs(extents))
    return same


@cases
def test_full_weights_can_stay_where_they_are(ranks, case):
    assert ranks(2, in_place, case, 2) == [True, True]


@cases
def test_described_and_verified(ranks, case):
    kinds = {"gathered": ("all-gather", INNER), "split_input": ("all-reduce", INNER)}
    kind, width = kinds.get(case, ("all-reduce", OUT))
    before = describe(build(case, 2), CASES[case][1], size=2)
    assert before.collectives == [Collective(kind, 1, width * 8)]
    assert describe(apply(build(case, 2), CASES[case][1], group=Group(0, 2))) == before
    for found in ranks(2, verdict, case, CASES[case][1]):
        assert found.ok and found.identical


def verdict(group, case, plan):
    return verify(build(case, 2), inputs(2), plan, group=group)


def test_verify_finds_halves_that_are_cut_as_one(ranks):
    plan = {"inverted": "colwise", "depth": "depthwise", "point": "rowwise"}
    for found in ranks(2, verdict, "gated", plan):
        assert not found.ok and found.first_wrong.path == "point"


BIAS = {torch.float64: 1e12, torch.float32: 1e6, torch.bfloat16: 1e6, torch.float16: 1e4}


def bias_alone(group, dtype):
    """Whether a rowwise convolution of zeros returns its bias, as it is and summed in float32."""
    conv = nn.Conv2d(12, 3, 3, padding=1)
    bias = (torch.randn(3, generator=torch.Generator().manual_seed(1)) * BIAS[dtype]).to(dtype)
    conv.weight.data, conv.bias.data = torch.zeros_like(conv.weight, dtype=dtype), bias
    x, same = torch.ones(2, 12 // group.size, 4, 4, dtype=dtype), []
    for options in ({}, {"reduce_dtype": torch.float32}):
        model = apply(nn.Sequential(copy.deepcopy(conv)), {"0": "rowwise"}, group=group, check=False, **options)
        y = model(x)
        same.append(y.dtype == dtype and torch.equal(y, bias[:, None, None].expand_as(y)))
    return same


@pytest.mark.parametrize("dtype", BIAS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_bias_is_added_once(ranks, size, dtype):
    assert ranks(size, bias_alone, dtype) == [[True, True]] * size


def rounded(group, reduce_dtype, autocast):
    """Whether the sum of 256 and three ones, of which bfloat16 loses those that come later, is 259 rounded to 260."""
    conv = nn.Conv2d(4, 1, 1, bias=False, dtype=torch.float32 if autocast else torch.bfloat16)
    conv.weight.data[:, :, 0, 0] = torch.tensor([256.0, 1, 1, 1])
    model = apply(nn.Sequential(conv), {"0": "rowwise"}, group=group, check=False, reduce_dtype=reduce_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = model(torch.ones(1, 1, 8, 8, dtype=conv.weight.dtype))
    return y.dtype == torch.bfloat16 and bool((y == 260).all())


@pytest.mark.parametrize("autocast", [False, True], ids=["bfloat16", "autocast"])
def test_the_sum_is_rounded_once_where_that_is_asked_for(ranks, autocast):
    assert ranks(4, rounded, torch.float32, autocast) == [True] * 4
    assert ranks(4, rounded, None, autocast) == [False] * 4


class OwnConv(nn.Conv2d):
    def forward(self, x):
        return 2 * super().forward(x)


FITS = {"colwise": ColwiseConv, "rowwise": RowwiseConv, "depthwise": DepthwiseConv}
REFUSED = {
    "groups that are neither one nor all": (nn.Conv2d(8, 8, 3, groups=2), FITS, "8 channels to 8 in 2 groups"),
    "several filters for each channel": (nn.Conv2d(8, 16, 3, groups=8), FITS, "8 channels to 16 in 8 groups"),
    "filters of all channels": (nn.Conv2d(8, 8, 3), ["depthwise"], "'depthwise' is for as many groups"),
    "filters of one channel": (nn.Conv2d(8, 8, 3, groups=8), ["colwise", "rowwise"], "8 channels to 8 in 8 groups"),
    "a transposed one": (nn.ConvTranspose2d(8, 8, 3), ["colwise", "depthwise"], "it is a ConvTranspose2d, not a plain"),
    "a forward of its own": (OwnConv(8, 8, 3), FITS, "it is a OwnConv, not a plain nn.Conv1d, nn.Conv2d or nn.Conv3d"),
    "reflected borders": (
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), ["colwise", "rowwise"], "padding mode is 'reflect'"
    ),
    "channels that do not divide": (nn.Conv2d(6, 6, 3), ["colwise", "rowwise"], "6 is not divisible by 4 ranks"),
}  # fmt: skip


@pytest.mark.parametrize(("conv", "styles", "message"), REFUSED.values(), ids=REFUSED)
def test_a_convolution_that_a_style_does_not_fit_is_refused(conv, styles, message):
    for style in styles:
        model = nn.Sequential(conv)
        with pytest.raises(ValueError, match=message):
            apply(model, {"0": style}, group=Group(0, 4), check=False)
        assert model[0] is conv


def test_a_parametrised_one_is_refused():
    model = build("gated", 2)
    nn.utils.parametrizations.weight_norm(model.point)
    with pytest.raises(ValueError, match="'point' is parametrised"):
        apply(model, GATED, group=Group(0, 2))
    with pytest.raises(ValueError, match="parametrised"):
        RowwiseConv.from_conv(model.point)


def test_a_model_of_sharded_convolutions_is_sharded_already():
    model = apply(build("gated", 2), GATED, group=Group(0, 2))
    del model.__dict__["_tp_layers"]
    with pytest.raises(ValueError, match="'inverted' is sharded already"):
        apply(model, GATED, group=Group(0, 2))


def test_an_input_of_other_channels_is_refused():
    conv = nn.Conv2d(8, 4, 3)
    for options, channels, wanted in (({}, 8, 4), ({"split_input": True}, 4, 8)):
        layer = RowwiseConv.from_conv(conv, group=Group(0, 2), **options)
        with pytest.raises(ValueError, match=f"takes {wanted} channels on each of 2 ranks, its input has {channels}"):
            layer(torch.ones(1, channels, 5, 5))


def test_the_layers_print_and_name_what_torch_does():
    model = apply(Gated(2), GATED, group=Group(1, 2))
    assert repr(model.inverted) == (
        f"ColwiseConv({CHANNELS}, {INNER}, kernel_size=(1, 1), stride=(1, 1), groups=1, bias=True, rank 1 of 2, dim 0 "
        f"of {2 * INNER} in blocks ({INNER}, {INNER}))"
    )
    assert (model.depth.in_channels, model.depth.out_channels, model.depth.groups) == (INNER, INNER, INNER)
    assert (model.point.in_channels, model.point.out_channels) == (INNER // 2, OUT)
    assert model.state_dict().keys() == Gated(2).state_dict().keys()
