"""How a layer with adapters rounds in half precision and under autocast."""

import copy

import pytest
import torch

from close import relative_error
from linears import KINDS, linear_for, part
from seeded import noise
from test_adapter_layers import adapters_for, fuse, with_adapters
from tp_layers.layers.linear import ColwiseLinear, RowwiseLinear
from tp_layers.layers.low_rank import LowRank, attach
from tp_layers.layers.options import Options


def halves(group, kind, linear, x, adapters, options):
    layer, blocks, own = KINDS[kind]
    made = with_adapters(layer.from_linear(linear, group=group, blocks=blocks, options=options, **own), adapters)
    with torch.no_grad():
        return made(part(kind, made.spec, x, "input", group))


@pytest.mark.parametrize("options", [Options(), Options(reduce_dtype=torch.float32)], ids=["own_dtype", "float32"])
@pytest.mark.parametrize("kind", ["rowwise", "rowwise_split_input", "colwise_gather"])
def test_bfloat16_errs_at_most_twice_as_much_as_one_device_with_the_same_adapter(ranks, kind, options):
    half = torch.bfloat16
    linear = linear_for(kind, 2, half, unit=64, other=64, integer=False)
    n, k = linear.weight.shape
    x = noise(50, k, seed=1, dtype=half)
    down, up = noise(16, k, seed=2, dtype=half) / k**0.5, noise(n, 16, seed=3, dtype=half) / 4
    whole = LowRank(down, up, None, scaling=0.5)
    exact = x.double() @ (linear.weight.double() + 0.5 * up.double() @ down.double()).T + linear.bias.double()
    exact = exact.detach()
    one = copy.deepcopy(linear)
    attach(one, "a", whole)
    with torch.no_grad():
        own = relative_error(one(x), exact)
    for got in ranks(2, halves, kind, linear, x, [whole], options):
        assert got.dtype == half and relative_error(got, exact) <= 2 * own


def test_autocast_takes_adapters_as_it_takes_the_layer():
    linear = linear_for("rowwise", 1, integer=False)
    adapters = adapters_for(linear, 4, torch.float32)[:1]
    x = noise(3, linear.in_features)
    wanted = fuse(linear, adapters)(x).detach()
    for layer in (ColwiseLinear.from_linear(linear), RowwiseLinear.from_linear(linear)):
        with_adapters(layer, adapters)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            y = layer(x)
        assert y.dtype == torch.bfloat16 and relative_error(y, wanted) < 0.01
