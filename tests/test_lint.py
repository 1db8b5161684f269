"""Large weights that a plan leaves whole without saying so are noted, by `describe` and by `apply`."""

import logging

import pytest
import torch
from torch import nn

import tp_layers
from tp_layers.group import Group
from tp_layers.plans.lint import LARGE, pattern


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.side = nn.Linear(width, width)


class Model(nn.Module):
    """Two blocks; `side` is 11 % of the parameters, `small` under 1 %, `norm` has a single dim."""

    def __init__(self, width: int = 1024):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.small = nn.Linear(width, 64)
        self.norm = nn.LayerNorm(width)


PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
NOTE = (
    "'blocks.*.side.weight' (11.1% of the parameters) stays whole on every rank: shard it, or name its module "
    '"replicate" in the plan'
)


def meta(width: int = 1024) -> Model:
    with torch.device("meta"):
        return Model(width)


def test_a_forgotten_layer_is_noted():
    report = tp_layers.describe(meta(), PLAN, size=2)
    assert report.notes == [NOTE]
    assert f"note: {NOTE}" in str(report)


def test_a_layer_that_the_plan_names_is_not():
    for plan in ({"blocks.*.side": "replicate"}, {"blocks.*.side": "colwise_gather"}, {"blocks.*": "replicate"}):
        described = PLAN | plan if "blocks.*" not in plan else {"small": "colwise_gather"} | plan
        assert tp_layers.describe(meta(), described, size=2).notes == []


def test_one_rank_holds_everything_anyway():
    assert tp_layers.describe(meta(), PLAN, size=1).notes == []


def test_small_models_are_left_alone():
    assert LARGE > 512 * 512
    assert tp_layers.describe(meta(512), PLAN, size=2).notes == []


def test_apply_warns_and_goes_on(caplog):
    with caplog.at_level(logging.WARNING, "tp_layers"):
        model = tp_layers.apply(meta(), PLAN, group=Group(0, 2))
    assert [record.getMessage() for record in caplog.records] == [NOTE]
    assert tp_layers.describe(model).notes == [NOTE]


def test_replicate_names_parameters_too_and_changes_nothing():
    model = meta()
    before = dict(model.blocks[0].side.named_parameters())
    tp_layers.apply(model, PLAN | {"blocks.*.side.weight": "replicate"}, group=Group(0, 2))
    assert dict(model.blocks[0].side.named_parameters()) == before
    assert type(model.blocks[0].side) is nn.Linear


@pytest.mark.parametrize(
    ("name", "found"),
    [("blocks.0.side", "blocks.*.side"), ("a.1.b.22.c", "a.*.b.*.c"), ("to_out.0", "to_out.*"), ("fc1.x", "fc1.x")],
)
def test_numbers_become_stars(name, found):
    assert pattern(name) == found
