"""Every registered class: its plan, at two and four ranks, gives what one device gives, and each part of it matters."""

import re
from typing import Any

import pytest
import torch

import tp_layers
from close import FLOAT32, relative_error
from families import ONE_OF_EACH, REGISTERED, digest, run
from tp_layers.group import Group
from tp_layers.plans.families import PLANS
from tp_layers.plans.match import match
from tp_layers.plans.registry import plan_for
from tp_layers.plans.shard import sharding_of
from tp_layers.plans.shared import FUSED

labels = pytest.mark.parametrize("label", REGISTERED)
# What a plan may forget: styles by kind, as they are written in a plan.
KINDS = {"heads not divided": "Divide", "a norm taken locally": "rms_norm", "a rotary table not sliced": "SliceOutput"}


def kind_of(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def sharded(group: Group, label: str, without: str = "") -> tuple[list[torch.Tensor], int]:
    """The outputs (of rank 0) and their digest; with the styles of one kind dropped from the plan, unchecked."""
    family = REGISTERED[label]
    model = family.build()
    plan = {key: value for key, value in plan_for(model, modulation="sharded").items() if kind_of(value) != without}
    model = tp_layers.apply(model, plan, group=group, check=not without)
    outputs = run(model, family.inputs())
    return (outputs if group.rank == 0 else []), digest(outputs)


@labels
def test_sharded_equals_one_device_in_float32(ranks, label):
    wanted = run(REGISTERED[label].build(), REGISTERED[label].inputs())
    assert wanted and all(tensor.isfinite().all() and tensor.std() > 1e-3 for tensor in wanted)
    for size in (2, 4):
        results = ranks(size, sharded, label)
        assert len({bits for _, bits in results}) == 1
        for got, reference in zip(results[0][0], wanted, strict=True):
            assert relative_error(got, reference) <= FLOAT32, size


def from_checkpoint(group: Group, label: str, folder: str) -> tuple[list[torch.Tensor], int]:
    """The same through `load`, with the plan that a user gets."""
    family = REGISTERED[label]
    outputs = run(tp_layers.load(type(family.build()), folder, group=group), family.inputs())
    return (outputs if group.rank == 0 else []), digest(outputs)


@pytest.mark.parametrize("label", ONE_OF_EACH)
def test_a_checkpoint_of_each_family_is_loaded_sharded(ranks, tmp_path, label):
    model = REGISTERED[label].build()
    wanted = run(model, REGISTERED[label].inputs())
    model.save_pretrained(tmp_path)
    results = ranks(2, from_checkpoint, label, str(tmp_path))
    assert len({bits for _, bits in results}) == 1
    for got, reference in zip(results[0][0], wanted, strict=True):
        assert relative_error(got, reference) <= FLOAT32


def test_every_plan_has_a_test_config():
    assert {family.name for family in REGISTERED.values()} == set(PLANS)


@labels
def test_every_key_of_a_plan_names_something_in_some_config(label):
    name = REGISTERED[label].name
    models = [family.build() for family in REGISTERED.values() if family.name == name]
    # What fusing adds is named for every attention, as `to_qkv?` and `to_kv?`; test_fused.py has which of them come.
    fused = tuple(f".{added}?" for added in FUSED)
    for key in plan_for(models[0]):
        if key.endswith(fused):
            continue
        assert any(match(model, {f"{key.removesuffix('?')}?": "replicate"}) for model in models), key


@pytest.mark.slow
@pytest.mark.families
@labels
def test_the_output_depends_on_every_sharded_parameter(label):
    # Without this, a wrong shard could stay below the bound above.
    family = REGISTERED[label]
    model, inputs = family.build(), family.inputs()
    wanted = torch.cat([tensor.flatten() for tensor in run(model, inputs)])
    planned = family.build()
    tp_layers.apply(planned, plan_for(planned, modulation="sharded"))
    specs = sharding_of(planned).resolved.specs
    assert len(specs) > 5
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for key, spec in specs.items():
        kept = parameters[key].detach().clone()
        with torch.no_grad():
            parameters[key].copy_(kept.roll(1, spec.dim))
            moved = relative_error(torch.cat([tensor.flatten() for tensor in run(model, inputs)]), wanted)
            parameters[key].copy_(kept)
        if re.search(family.dead, key):
            assert moved == 0, key
        else:
            assert moved <= FLOAT32 if re.search(family.cancelled, key) else moved > 1e-5, key


def caught(ranks, label: str, kind: str) -> bool:
    wanted = run(REGISTERED[label].build(), REGISTERED[label].inputs())
    try:
        outputs, _ = ranks(2, sharded, label, KINDS[kind])[0]
    except Exception:
        return True
    return any(relative_error(got, reference) > 100 * FLOAT32 for got, reference in zip(outputs, wanted, strict=True))


def forgettable() -> list[tuple[str, str]]:
    """Pairs of a class and a kind of style that its plan has, for something that this config has."""
    found = []
    for label, family in REGISTERED.items():
        plan = PLANS[family.name]
        with torch.device("meta"):
            model = family.make()
        plan = plan if isinstance(plan, dict) else plan(model)
        for kind, style in KINDS.items():
            keys = [key for key, value in plan.items() if kind_of(value) == style]
            found += [(label, kind)] if keys and match(model, dict.fromkeys(keys, "replicate")) else []
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_incomplete_plan_is_caught_by_the_comparison(ranks, kind):
    assert caught(ranks, "LTXVideoTransformer3DModel", kind)


@pytest.mark.slow
@pytest.mark.families
@pytest.mark.parametrize(("label", "kind"), forgettable())
def test_an_incomplete_plan_is_caught_in_every_family(ranks, label, kind):
    assert caught(ranks, label, kind)
