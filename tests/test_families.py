"""Every registered family, sharded in memory and from its checkpoint, gives what one device gives."""

import re
from typing import Any

import diffusers
import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_layers
from close import FLOAT32, relative_error
from families import FAMILIES, run
from tp_layers.collectives import GATHER
from tp_layers.group import Group
from tp_layers.plans.shard import sharding_of

HALF = torch.bfloat16
names = pytest.mark.parametrize("name", FAMILIES)


def state(model: nn.Module) -> dict[str, Any]:
    """What must survive sharding: the keys, and every buffer with its device."""
    return {"keys": list(model.state_dict()), "buffers": dict(model.named_buffers())}


def sharded(group: Group, name: str, heads: int, folder: str | None, dtype: torch.dtype) -> dict[str, Any]:
    """The outputs of a family sharded over `group`, through `load` if a folder is given, else through `apply`."""
    family = FAMILIES[name]
    if folder is None:
        model = tp_layers.apply(family.build(heads, dtype), group=group)
    else:
        model = tp_layers.load(getattr(diffusers, name), folder, group=group, dtype=dtype)
    meta = [key for key, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    return {"outputs": run(model, family.inputs(), dtype), "meta": meta, "training": model.training, **state(model)}


def without_collectives(group: Group, name: str, folder: str) -> list[list[torch.Tensor]]:
    """The outputs at size 1, through `apply` and `load`, with every collective replaced by an error."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a collective was called")

    names = ("all_reduce", GATHER, "broadcast_object_list", "send", "recv")
    kept = {call: getattr(dist, call) for call in names}
    try:
        for call in names:
            setattr(dist, call, refuse)
        return [sharded(group, name, 4, place, torch.float32)["outputs"] for place in (None, folder)]
    finally:
        for call, function in kept.items():
            setattr(dist, call, function)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """Saves a family's tiny model, in several files, once."""
    folders: dict[tuple[str, int], str] = {}

    def save(name: str, heads: int = 4) -> str:
        if (name, heads) not in folders:
            folder = tmp_path_factory.mktemp(name)
            FAMILIES[name].build(heads).save_pretrained(folder, max_shard_size="200KB")
            assert len(list(folder.glob("*.safetensors"))) > 1
            folders[name, heads] = str(folder)
        return folders[name, heads]

    return save


def check(results: list[dict[str, Any]], model: nn.Module, wanted: list[torch.Tensor]) -> None:
    """Every rank close to one device, bit for bit the same as rank 0, and with the same keys and buffers."""
    expected = state(model)
    for result in results:
        assert result["meta"] == [] and result["training"] is False and result["keys"] == expected["keys"]
        assert result["buffers"].keys() == expected["buffers"].keys()
        for key, buffer in expected["buffers"].items():
            assert torch.equal(result["buffers"][key], buffer), key
        for got, first, reference in zip(result["outputs"], results[0]["outputs"], wanted, strict=True):
            assert torch.equal(got, first)
            assert relative_error(got, reference) <= FLOAT32


@names
@pytest.mark.parametrize("way", ["apply", "load"])
@pytest.mark.parametrize(("size", "heads"), [(2, 4), (4, 4), (3, 3)], ids=["two ranks", "four ranks", "three ranks"])
def test_sharded_equals_one_device_in_float32(ranks, checkpoint, name, way, size, heads):
    model = FAMILIES[name].build(heads)
    wanted = run(model, FAMILIES[name].inputs())
    folder = checkpoint(name, heads) if way == "load" else None
    check(ranks(size, sharded, name, heads, folder, torch.float32), model, wanted)


@names
def test_size_one_is_bit_exact_and_without_a_collective(ranks, checkpoint, name):
    wanted = run(FAMILIES[name].build(), FAMILIES[name].inputs())
    for outputs in ranks(1, without_collectives, name, checkpoint(name))[0]:
        assert all(torch.equal(got, reference) for got, reference in zip(outputs, wanted, strict=True))


@names
@pytest.mark.parametrize("size", [2, 4], ids=["two ranks", "four ranks"])
def test_bfloat16_is_at_most_twice_as_far_from_float64_as_one_device(ranks, checkpoint, name, size):
    family = FAMILIES[name]
    half = family.build(dtype=HALF)
    # The reference has the rounded weights: only the arithmetic differs.
    exact = nn.Module.to(family.build(dtype=HALF), torch.float64)
    rounded = {
        key: value.to(HALF) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in family.inputs().items()
    }
    truth = torch.cat([tensor.flatten().double() for tensor in run(exact, rounded, torch.float64)])
    own = relative_error(torch.cat([tensor.flatten() for tensor in run(half, family.inputs(), HALF)]), truth)
    assert 0 < own < 0.05
    for folder in (None, checkpoint(name)):
        for result in ranks(size, sharded, name, 4, folder, HALF):
            got = torch.cat([tensor.flatten() for tensor in result["outputs"]])
            assert relative_error(got, truth) <= 2 * own


@names
def test_the_output_depends_on_every_sharded_parameter(name):
    # Without this, a wrong shard could stay below the bounds above.
    model, inputs = FAMILIES[name].build(), FAMILIES[name].inputs()
    wanted = torch.cat([tensor.flatten() for tensor in run(model, inputs)])
    specs = sharding_of(tp_layers.apply(FAMILIES[name].build())).resolved.specs
    assert len(specs) > 10
    parameters = dict(model.named_parameters())
    for key, spec in specs.items():
        kept = parameters[key].detach().clone()
        with torch.no_grad():
            parameters[key].copy_(kept.roll(1, spec.dim))
            moved = relative_error(torch.cat([tensor.flatten() for tensor in run(model, inputs)]), wanted)
            parameters[key].copy_(kept)
        assert moved == 0 if re.search(FAMILIES[name].dead, key) else moved > 1e-4, key
