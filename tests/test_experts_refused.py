"""Plans in which partial sums do not add up are refused, or noted where nothing is checked."""

import pytest

from experts import PLANS, Bare, Experts, build
from tp_layers import describe

ROUTER = {"moe": "all_reduce_output", "moe.router": "replicated_with_grad_allreduce"}
EXPERT = {"moe.experts.*.gate_up": "colwise", "moe.experts.*.down": "rowwise_partial"}
SHARED = {"moe.shared.gate_up": "colwise", "moe.shared.down": "rowwise_partial"}
WRONG = {
    "a partial sum that nobody adds": (
        {**EXPERT, **SHARED},
        "'moe.experts.0.down' leaves a partial sum, and no module around it is \"all_reduce_output\"",
    ),
    "a parameter's partial sum that nobody adds": (
        {key: style for key, style in PLANS[Bare].items() if key != "moe"},
        "'moe.down' leaves a partial sum",
    ),
    "nothing to add": (
        {**ROUTER, "before": "colwise", "after": "rowwise"},
        "nothing in 'moe' leaves a partial sum for it to add",
    ),
    "a whole output among them": (
        {**ROUTER, **EXPERT, **SHARED, "moe.shared.down": "rowwise"},
        "'moe.shared.down' is within 'moe', where partial sums are added",
    ),
    "a sum among them": (
        {**ROUTER, **EXPERT, **SHARED, "moe.shared": "all_reduce_output"},
        "'moe.shared' is within 'moe', where partial sums are added",
    ),
    "a whole expert among them": ({**ROUTER, **EXPERT}, "'moe.shared.gate_up.weight' is whole within 'moe'"),
    "a router whose gradient nobody adds": (
        {**ROUTER, **EXPERT, **SHARED, "moe.router": "replicate"},
        "'moe.router.weight' is whole within 'moe', whose output would count it on every rank: shard it, or call it "
        '"replicated_with_grad_allreduce"',
    ),
}


@pytest.mark.parametrize(("plan", "message"), WRONG.values(), ids=WRONG)
def test_a_plan_in_which_the_sums_do_not_add_up_is_refused(plan, message):
    model = build(Bare if "moe.up" in plan else Experts)
    with pytest.raises(ValueError) as error:
        describe(model, plan, size=2)
    assert message in str(error.value)
    assert any(message in note for note in describe(model, plan, size=2, check=False).notes)
