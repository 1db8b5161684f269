"""Fine-tuning through a sharded model: every parameter's gradient, on every rank, is the unsharded model's."""

import diffusers
import pytest
import torch
from torch import nn

import tp_layers
from close import FLOAT32, relative_error
from families import FAMILIES
from families.family import backward
from tp_layers.group import Group
from tp_layers.plans.shard import sharding_of

# In float64, so that what is compared is the derivative and not its rounding; a rotary table in float32 inside a model
# leaves differences of 1e-7.
EXACT = torch.float64


def sharded(group: Group, name: str, folder: str | None) -> tuple[dict[str, torch.Tensor | None], int]:
    """Each parameter's gradient on this rank, cut from the unsharded gradient's place, and how many are sharded."""
    family = FAMILIES[name]
    if folder is None:
        model = tp_layers.apply(nn.Module.to(family.build(), EXACT), group=group)
    else:
        model = tp_layers.load(getattr(diffusers, name), folder, group=group)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(EXACT)
        for module in model.modules():
            module._buffers.update(
                {key: value.to(EXACT) for key, value in module._buffers.items() if value is not None}
            )
    return backward(model, family.inputs(), EXACT, calls=2), len(sharding_of(model).resolved.specs)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("way", "size"),
    [("apply", 2), ("apply", 4), ("load", 2)],
    ids=["in memory, two ranks", "in memory, four ranks", "loaded, two ranks"],
)
def test_every_gradient_on_every_rank_equals_the_unsharded_one(ranks, tmp_path, name, way, size):
    family = FAMILIES[name]
    folder = None
    if way == "load":
        family.build().save_pretrained(tmp_path)
        folder = str(tmp_path)
    model = nn.Module.to(family.build(), EXACT)
    wanted = backward(model, family.inputs(), EXACT, calls=2)
    specs = sharding_of(tp_layers.apply(model)).resolved.specs
    for rank, (got, count) in enumerate(ranks(size, sharded, name, folder)):
        assert count == len(specs) and got.keys() == wanted.keys()
        for key, full in wanted.items():
            if full is None:
                assert got[key] is None, key
                continue
            share = specs[key].take(full, rank, size) if key in specs else full
            assert relative_error(got[key], share) <= FLOAT32, key
