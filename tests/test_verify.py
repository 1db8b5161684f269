"""`verify` has a verdict: a right plan passes, a wrong one is reported at its first wrong module."""

import math
from pathlib import Path

import pytest
import torch

import verify_case
from families import FAMILIES
from tp_layers.cli import main
from tp_layers.group import Group
from tp_layers.verify import Verification, verify

CASE = str(Path(__file__).with_name("verify_case.py"))
# The plan, the module at which it first goes wrong, and what is said of it.
FAULTS = {
    "colwise and rowwise swapped": ("swapped", "forward", "blocks.0.gate_up", "takes 12 of 24 columns"),
    "a fused projection sharded plainly": ("plainly", "output", "blocks.0.act", "relative error"),
    "heads not divided": ("undivided", "input", "blocks.0.attn.to_out", "relative error"),
    "a norm taken locally": ("local_norm", "output", "blocks.0.attn.norm_q", "relative error"),
}
faults = pytest.mark.parametrize("fault", FAULTS)


def verdict(group: Group, plan: str) -> Verification:
    model, inputs = verify_case.case()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = verify(model, inputs, getattr(verify_case, plan), group=group)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert type(model.blocks[0].gate_up) is torch.nn.Linear
    return found


def family(group: Group, name: str) -> Verification:
    return verify(FAMILIES[name].build(), FAMILIES[name].inputs(), group=group)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_right_plan_passes(ranks, size):
    for found in ranks(size, verdict, "right"):
        assert found.ok and found.identical and found.first_wrong is None
        assert found.error < 1e-6 and found.size == size
        # Three projections, two norms with their inputs, the output projection with its input, and the MLP; twice.
        assert len(found.layers) == 2 * (1 + 3 + 4 + 2 + 1 + 2)


@faults
def test_a_wrong_plan_is_reported_at_its_first_wrong_module(ranks, fault):
    plan, place, path, reason = FAULTS[fault]
    for found in ranks(2, verdict, plan):
        assert not found.ok
        assert (found.first_wrong.path, found.first_wrong.place) == (path, place)
        assert f"first wrong: the {place} of '{path}'" in str(found) and reason in str(found)
        assert math.isnan(found.error) or found.error > 1e-3


def test_the_fused_projection_is_named_as_what_ran_before(ranks):
    found = ranks(2, verdict, "plainly")[0]
    assert found.after == "blocks.0.gate_up" and "'blocks.0.gate_up'" in str(found)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_registered_plans_pass(ranks, name):
    found = ranks(2, family, name)[0]
    assert found.ok and found.error < 1e-6 and len(found.layers) > 15


@faults
def test_the_command_exits_with_one_for_a_wrong_plan(capsys, fault):
    plan, place, path, _ = FAULTS[fault]
    assert main(["verify", f"{CASE}:case", "--plan", f"{CASE}:{plan}", "--size", "2"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG" in printed and f"the {place} of '{path}'" in printed


def test_the_command_exits_with_zero_for_a_right_plan(capsys):
    assert main(["verify", f"{CASE}:case", "--plan", f"{CASE}:right", "--size", "2"]) == 0
    assert "Model on 2 ranks: equal to one rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["verify", f"{CASE}:case", "--plan", f"{CASE}:misspelt", "--size", "2"], "matches nothing"),
        (["verify", f"{CASE}:case", "--plan", f"{CASE}:right", "--size", "3"], "not divisible by 3 ranks"),
        (["verify", f"{CASE}:case", "--size", "2"], "no plan for Model"),
        (["verify", f"{CASE}:WIDTH", "--size", "2"], "not callable"),
        (["verify", f"{CASE}:nothing", "--size", "2"], "cannot import"),
        (["verify", "no_such_file.py:case", "--size", "2"], "there is no file"),
        (["verify", "case", "--size", "2"], "expected FILE.py:NAME"),
    ],
    ids=["misspelt key", "odd size", "no plan", "not a function", "no such name", "no such file", "no colon"],
)
def test_the_command_exits_with_two_where_nothing_can_be_verified(capsys, arguments, message):
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_inputs_that_the_unsharded_model_refuses_are_an_error():
    model, _ = verify_case.case()
    with pytest.raises(ValueError, match="the unsharded model fails on these inputs"):
        verify(model, torch.zeros(2, 5, 7), verify_case.right, group=Group())


def test_without_ranks_a_size_is_needed():
    model, inputs = verify_case.case()
    with pytest.raises(ValueError, match="needs size="):
        verify(model, inputs, verify_case.right)
