"""The keywords of `apply` and `load`: every one that is accepted changes what a sharded model does."""

from typing import Any

import pytest
import torch
from torch import nn

import tp_layers
from close import FLOAT32, randomise, relative_error
from families import FAMILIES, run
from tp_layers import ColwiseLinear, RowwiseLinear
from tp_layers.group import Group
from tp_layers.layers.options import Options
from tp_layers.plans.shard import sharding_of
from tp_layers.plans.spec import ShardSpec

sizes = pytest.mark.parametrize("size", [1, 2, 3, 4])
BFLOAT16 = torch.bfloat16


def noise(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rowwise_errors(group: Group, dtype: torch.dtype) -> dict[str, float]:
    """The error of one rowwise layer against float64, reduced in its own dtype and in float32, and one device's."""
    linear = randomise(nn.Linear(384, 96)).to(dtype)
    x = noise(64, 384, dtype=dtype)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    share = ShardSpec.of(-1, 384).take(x, group.rank, group.size)
    found = {"one device": relative_error(linear(x).detach(), exact.detach())}
    for name, reduce_dtype in (("own", None), ("float32", torch.float32)):
        layer = RowwiseLinear.from_linear(linear, group=group, options=Options(reduce_dtype=reduce_dtype))
        y = layer(share)
        assert y.dtype == dtype
        found[name] = relative_error(y.detach(), exact.detach())
        y.sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.dtype == dtype
    return found


@sizes
@pytest.mark.parametrize("dtype", [BFLOAT16, torch.float16], ids=["bfloat16", "float16"])
def test_a_reduction_in_float32_is_rounded_once(ranks, size, dtype):
    for found in ranks(size, rowwise_errors, dtype):
        # Rounded once, as one device is; the order of the float32 sum moves a few results by one ulp.
        assert found["float32"] <= 1.01 * found["one device"]
        assert found["own"] <= 3 * found["one device"]
        assert (found["own"] > found["float32"]) == (size > 1)


def several_inputs(group: Group) -> dict[str, torch.Tensor]:
    linear = randomise(nn.Linear(36, 10))
    blocks = [1, 2]
    layer = RowwiseLinear.from_linear(linear, group=group, blocks=blocks)
    first, second = noise(2, 5, 12), noise(2, 5, 24, seed=2)
    parts = [ShardSpec.of(-1, x.shape[-1]).take(x, group.rank, group.size) for x in (first, second)]
    whole = linear(torch.cat([first, second], -1))
    return {"several": layer(parts), "one": layer(torch.cat(parts, -1)), "whole": whole}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_rowwise_layer_takes_its_blocks_as_several_inputs(ranks, size):
    for found in ranks(size, several_inputs):
        assert torch.equal(found["several"], found["one"])
        assert relative_error(found["several"].detach(), found["whole"].detach()) <= FLOAT32


def test_several_inputs_of_another_width_are_refused():
    layer = RowwiseLinear.from_linear(nn.Linear(36, 10), group=Group(0, 2))
    with pytest.raises(ValueError, match=r"takes 18 of 36 columns .* its input has 17"):
        layer([noise(2, 8), noise(2, 9)])
    whole = RowwiseLinear.from_linear(nn.Linear(36, 10), group=Group(0, 2), split_input=True)
    with pytest.raises(ValueError, match="takes one whole input"):
        whole([noise(2, 18), noise(2, 18)])


def in_place(group: Group, name: str) -> dict[str, Any]:
    """A family with its full weights left in place."""
    model = FAMILIES[name].build()
    before = {key: (parameter, parameter.data_ptr()) for key, parameter in model.named_parameters()}
    tp_layers.apply(model, group=group, copy=False)
    linears = [module for module in model.modules() if isinstance(module, ColwiseLinear | RowwiseLinear)]
    kept = all(
        parameter is before[key][0] and parameter.data_ptr() == before[key][1]
        for key, parameter in model.named_parameters()
        if not key.endswith(("norm_q.weight", "norm_k.weight"))
    )
    report = tp_layers.describe(model)
    return {
        "outputs": run(model, FAMILIES[name].inputs()),
        "kept": kept and len(linears) > 5,
        "held": report.held_bytes,
        "full": report.full_bytes,
    }


@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "MiniMaxH3Transformer3DModel"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_full_weights_in_place_give_the_same_output(ranks, name, size):
    wanted = run(FAMILIES[name].build(), FAMILIES[name].inputs())
    for found in ranks(size, in_place, name):
        assert found["kept"] and found["held"] == found["full"]
        for got, reference in zip(found["outputs"], wanted, strict=True):
            assert relative_error(got, reference) <= FLOAT32


def saved_in_place(group: Group, folder: str) -> None:
    tp_layers.save(tp_layers.apply(FAMILIES["Flux2Transformer2DModel"].build(), group=group, copy=False), folder)


def test_full_weights_in_place_are_saved_whole(ranks, tmp_path):
    ranks(2, saved_in_place, str(tmp_path))
    model = FAMILIES["Flux2Transformer2DModel"].build()
    again = tp_layers.load(type(model), tmp_path, group=Group())
    assert all(torch.equal(again.state_dict()[key], value) for key, value in model.state_dict().items())


def test_full_weights_in_place_refuse_to_be_trained():
    for kind in (ColwiseLinear, RowwiseLinear):
        layer = kind.from_linear(nn.Linear(8, 8), group=Group(0, 2), options=Options(copy=False))
        with pytest.raises(ValueError, match="copy=False is for inference"):
            layer(noise(3, layer.in_features))


def backends(group: Group) -> list[str]:
    """What a layer says of a backend that cannot run here, by keyword of `apply` and by process default."""
    said = []
    model = randomise(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    tp_layers.apply(model, {"0": "colwise", "1": "rowwise"}, group=group, backend="triton")
    try:
        model(noise(2, 8))
    except ValueError as error:
        said.append(str(error))
    return said


def test_the_backend_reaches_the_layers(ranks):
    for said in ranks(2, backends):
        assert "need" in said[0] and "use backend='torch'" in said[0]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"backend": "cuda"}, "must be one of auto, triton, torch"),
        ({"reduce_dtype": torch.int32}, "floating-point"),
        ({"fuse": "yes"}, "fuse must be True, False, or None"),
    ],
    ids=["unknown backend", "integer reduction", "fuse in words"],
)
def test_bad_options_are_refused_before_anything_is_touched(keywords, message, tmp_path):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(ValueError, match=message):
        tp_layers.apply(model, {"0": "colwise", "1": "rowwise"}, **keywords)
    assert type(model[0]) is nn.Linear and sharding_of(model) is None
    with pytest.raises(ValueError, match=message):
        tp_layers.load(nn.Linear, tmp_path / "nowhere", **keywords)
