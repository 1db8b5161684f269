"""Layers a plan calls "modulation": sharded where they weigh, whole where they do not or where the caller says so."""

import diffusers
import pytest
import torch
from torch import nn

import tp_layers
from families import FAMILIES
from tp_layers.plans.modulation import SHARE, with_modulation


class Model(nn.Module):
    """`shift` has `rows` of 100 parameters, `body` the rest of 10000."""

    def __init__(self, rows: int):
        super().__init__()
        self.shift = nn.Linear(100, rows, bias=False)
        self.body = nn.Linear(100, 100 - rows, bias=False)


PLAN = {"body": "colwise_gather", "shift": "modulation"}


@pytest.mark.parametrize(("rows", "style"), [(6, "colwise_gather"), (5, "replicate"), (4, "replicate")])
def test_they_are_sharded_above_five_per_cent_of_the_parameters(rows, style):
    assert SHARE == 0.05
    assert with_modulation(Model(rows), PLAN) == {"body": "colwise_gather", "shift": style}


@pytest.mark.parametrize(("choice", "style"), [("sharded", "colwise_gather"), ("whole", "replicate")])
def test_the_caller_may_choose(choice, style):
    for rows in (2, 20):
        assert with_modulation(Model(rows), PLAN, choice)["shift"] == style
    assert PLAN["shift"] == "modulation"


def test_another_choice_is_refused():
    with pytest.raises(ValueError, match="modulation must be one of 'auto', 'sharded', 'whole', got 'none'"):
        tp_layers.plan_for(FAMILIES["FluxTransformer2DModel"].build(), modulation="none")


def test_a_modulation_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match="the plan key 'shfit' matches nothing in Model; the nearest path is 'shift'"):
        with_modulation(Model(20), {"shfit": "modulation"})


def test_the_order_of_the_plan_stays():
    assert list(with_modulation(Model(20), PLAN)) == list(PLAN)


@pytest.mark.parametrize(
    "name", ["FluxTransformer2DModel", "QwenImageTransformer2DModel", "MiniMaxH3Transformer3DModel"]
)
def test_published_modulations_are_sharded_and_opting_out_leaves_them_whole(name):
    with torch.device("meta"):
        model = getattr(diffusers, name)()
    held = {
        choice: tp_layers.describe(model, tp_layers.plan_for(model, modulation=choice), size=8).held_bytes
        for choice in ("auto", "sharded", "whole")
    }
    assert held["auto"] == held["sharded"] < 0.4 * held["whole"]
