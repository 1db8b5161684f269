"""Which plan a model gets, and that the plans of diffusers' own classes and the registered ones cut the same."""

import diffusers
import pytest
import torch
from diffusers.hooks.tensor_parallel import resolve_tp_shard_specs
from torch import nn

from families import FAMILIES
from refused import refused
from tp_layers import apply, register
from tp_layers.group import Group
from tp_layers.plans import registry
from tp_layers.plans.registry import plan_for
from tp_layers.plans.resolve import resolve


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """A copy of the registry, for this test alone."""
    monkeypatch.setattr(registry, "_PLANS", dict(registry._PLANS))


class Model(nn.Module):
    """Three layers, one for each place a plan comes from."""

    _tp_plan = None

    def __init__(self):
        super().__init__()
        self.argument, self.registered, self.own = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)


class WithPlan(Model):
    _tp_plan = {"own": "rowwise_split_input"}  # noqa: RUF012


class Derived(WithPlan):
    pass


class Plain(Model):
    pass


def sharded(model):
    return [name for name, module in model.named_children() if not isinstance(module, nn.Linear)]


def test_the_argument_comes_first_then_the_registry_then_the_models_own_plan():
    assert sharded(apply(WithPlan())) == ["own"]
    register("WithPlan", {"registered": "colwise_gather"})
    assert sharded(apply(WithPlan())) == ["registered"]
    assert sharded(apply(WithPlan(), {"argument": "colwise_gather"})) == ["argument"]


def test_a_plan_of_the_instance_is_found():
    model = Model()
    model._tp_plan = {"own": "colwise_gather"}
    assert plan_for(model) is model._tp_plan


def test_the_last_registration_wins():
    register("Model", {"argument": "colwise_gather"})
    register("Model", {"registered": "colwise_gather"})
    assert sharded(apply(Model())) == ["registered"]


def test_a_plan_holds_for_subclasses_until_they_have_their_own_and_the_nearest_wins():
    register("Model", {"argument": "colwise_gather"})
    assert sharded(apply(Plain())) == ["argument"]
    assert sharded(apply(Derived())) == ["own"]
    register("WithPlan", {"registered": "colwise_gather"})
    assert sharded(apply(Derived())) == ["registered"]
    register("Derived", {"own": "colwise_gather"})
    assert sharded(apply(Derived())) == ["own"]
    assert sharded(apply(WithPlan())) == ["registered"]
    assert sharded(apply(Model())) == ["argument"]


def test_a_function_of_the_model_is_called_with_it():
    seen = []

    def plan(model):
        seen.append(model)
        return {name: "colwise_gather" for name, _ in model.named_children()}

    register("Model", plan)
    model = Plain()
    assert sharded(apply(model)) == ["argument", "registered", "own"]
    assert len(seen) == 1
    assert seen[0] is model


def test_a_registered_plan_of_diffusers_is_overridden():
    plan = {"proj_out": "colwise_gather"}
    register("FluxTransformer2DModel", plan)
    assert plan_for(FAMILIES["FluxTransformer2DModel"].build()) is plan


def test_a_class_without_a_plan_is_told_what_to_do():
    model = Model()
    with refused(model, "no plan for Model: pass plan={...}, or call tp_layers.register", "FluxTransformer2DModel"):
        apply(model, group=Group(0, 2))


def test_an_empty_plan_is_refused_wherever_it_comes_from():
    model = Model()
    with refused(model, "the plan for Model is empty"):
        apply(model, {}, group=Group(0, 2))
    register("Model", {})
    with refused(model, "the plan for Model is empty"):
        apply(model, group=Group(0, 2))


def test_only_mappings_and_functions_are_registered():
    with pytest.raises(ValueError, match="the plan for Model must be a mapping or a function of the model, got list"):
        register("Model", ["colwise"])
    assert "Model" not in registry._PLANS


OWN_PLANS = [
    "FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel", "QwenImage21Transformer2DModel"
]  # fmt: skip


def test_these_are_all_the_classes_of_diffusers_with_a_plan():
    classes = {name for name in dir(diffusers.models) if getattr(getattr(diffusers.models, name), "_tp_plan", None)}
    assert classes == set(OWN_PLANS)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", OWN_PLANS)
def test_diffusers_plan_and_ours_cut_the_same_parameters_alike(name, size):
    """And as diffusers itself would cut them."""
    family = FAMILIES[name]
    with torch.device("meta"):
        model = getattr(diffusers, name)(**family.config(4))
    assert plan_for(model) is not model._tp_plan
    # diffusers leaves the modulations whole, and knows no names for it.
    ours, own = (resolve(model, plan, size) for plan in (plan_for(model, modulation="whole"), model._tp_plan))
    assert ours.specs == own.specs
    assert (ours.sizes, ours.notes) == (own.sizes, own.notes)
    assert set(ours.styles) == set(own.styles)
    theirs = resolve_tp_shard_specs(model, model._tp_plan, size)
    cut = {key: (spec.dim, spec.block_sizes) for key, spec in theirs.items() if spec.dim is not None}
    assert {key: (spec.dim, list(spec.blocks)) for key, spec in ours.specs.items()} == cut


@pytest.mark.parametrize("name", OWN_PLANS)
def test_diffusers_plan_and_ours_build_the_same_layers(name):
    ours, own = FAMILIES[name].build(), FAMILIES[name].build()
    apply(ours, plan_for(ours, modulation="whole"))
    apply(own, own._tp_plan)
    assert repr(ours) == repr(own)
    assert "rank 0 of 1" in repr(ours)
