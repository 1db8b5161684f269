"""What a plan resolves to: specs and sizes, the norms within a head, and whether somebody takes each split output."""

import pytest
from torch import nn

from refused import refused
from toy_plans import Toy, packed
from tp_layers import Divide, PackedColwiseParallel, PackedRowwiseParallel, ShardParameter, SliceOutput, apply
from tp_layers.group import Group
from tp_layers.plans.resolve import resolve
from tp_layers.plans.spec import ShardSpec


def test_what_a_resolved_plan_says():
    plan = {
        **packed([3, 1]),
        "blocks.*.rms": "rms_norm",
        "blocks.*.table": ShardParameter(-1),
        "blocks.*": Divide("groups"),
    }
    resolved = resolve(Toy(1), plan, 2)
    rows, one = ShardSpec(0, (6, 2)), ShardSpec(0, (8,))
    assert resolved.specs == {
        "blocks.0.up.weight": rows,
        "blocks.0.up.bias": rows,
        "blocks.0.down.weight": ShardSpec(1, (8,)),
        "blocks.0.rms.weight": one,
        "blocks.0.table": ShardSpec(-1, (8,)),
    }
    # Weight and bias cannot disagree: their spec is one object.
    assert resolved.specs["blocks.0.up.weight"] is resolved.specs["blocks.0.up.bias"]
    assert list(resolved.styles) == [f"blocks.0{rest}" for rest in (".up", ".down", ".rms", ".table", "")]
    assert (resolved.size, resolved.sizes, resolved.notes) == (2, [1, 2], [])


HEAD_NORMS = {
    "a_norm_of_one_head": (nn.RMSNorm(4), ["to_q", "to_out", "norm"]),
    "a_layer_norm_of_one_head": (nn.LayerNorm(4), ["to_q", "to_out", "norm"]),
    "a_norm_of_the_projections_input": (nn.RMSNorm(8), ["to_q", "to_out"]),
    "a_norm_of_the_projections_output": (nn.LayerNorm(16), ["to_q", "to_out"]),
    "a_norm_of_no_part_of_it": (nn.RMSNorm(5), ["to_q", "to_out"]),
    "a_norm_without_weights": (nn.RMSNorm(4, elementwise_affine=False), ["to_q", "to_out"]),
}


@pytest.mark.parametrize(("norm", "paths"), HEAD_NORMS.values(), ids=HEAD_NORMS)
def test_which_norm_beside_a_colwise_projection_acts_within_a_head(norm, paths):
    """Its gradients are partial; those of a norm before or after the projections are whole, and summing spoils them."""
    model = nn.Module()
    model.to_q, model.to_out, model.norm = nn.Linear(8, 32), nn.Linear(32, 16), norm
    resolved = resolve(model, {"to_q": "colwise", "to_out": "rowwise"}, 2)
    assert list(resolved.styles) == paths
    assert "norm.weight" not in resolved.specs


class Rest(nn.Module):
    """Blocks of two feed-forwards; the second block's `down` is missing; a rowwise of the model's own."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList()
        for _ in range(2):
            block = nn.ModuleDict({name: nn.ModuleDict(self.pair()) for name in ("ff", "ff_context")})
            self.blocks.append(block)
        del self.blocks[1].ff["down"]
        self.blocks[1]["rope"] = nn.Identity()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    @staticmethod
    def pair():
        return {"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)}


UNREAD = {
    "in_the_model": ({"first": "colwise"}, ["'first' is split", "no module in the model takes a split input"]),
    "a_packed_one": (
        {"first": PackedColwiseParallel([1, 1])},
        ["'first' is split", "no module in the model takes a split input"],
    ),
    "a_whole_input_rowwise_does_not_take_it": (
        {"first": "colwise", "last": "rowwise_split_input"},
        ["'first' is split", "no module in the model"],
    ),
    "another_block_does_not_take_it": (
        {"blocks.*.ff.up": "colwise", "blocks.*.ff.down": "rowwise"},
        ["plan key 'blocks.*.ff.up'", "'blocks.1.ff.up' is split", "no module in 'blocks.1' takes a split input"],
    ),
    "the_model_outside_the_block_does_not_take_it": (
        {"blocks.*.ff.up": "colwise", "first": "colwise", "last": "rowwise"},
        ["'blocks.0.ff.up' is split", "no module in 'blocks.0' takes a split input"],
    ),
    "the_other_entry_of_the_last_star_does_not_take_it": (
        {"blocks.*.*.up": "colwise", "blocks.0.ff.down": "rowwise"},
        ["'blocks.0.ff_context.up' is split", "no module in 'blocks.0.ff_context' takes a split input"],
    ),
    "a_table": ({"blocks.*.rope": SliceOutput(-1)}, ["'blocks.1.rope' is split", "no module in 'blocks.1'"]),
}


@pytest.mark.parametrize(("plan", "message"), UNREAD.values(), ids=UNREAD)
def test_a_split_output_that_nobody_takes_is_refused_unless_check_is_off(plan, message, caplog):
    model = Rest()
    with refused(model, *message, "pass check=False if that is meant"):
        apply(model, plan, group=Group(0, 2))
    resolved = resolve(model, plan, 2, check=False)
    assert [part for part in message if part not in resolved.notes[0]] == []
    assert apply(model, plan, group=Group(), check=False) is model
    assert resolved.notes[0] in caplog.text


READ = {
    "by_the_other_feed_forward_of_its_block": {"blocks.*.ff.up": "colwise", "blocks.*.ff_context.down": "rowwise"},
    "by_any_module_where_the_key_has_no_star": {"blocks.1.ff.up": "colwise", "last": "rowwise"},
    "by_a_packed_rowwise": {"first": "colwise", "last": PackedRowwiseParallel([1, 1])},
    "gathered": {"first": "colwise_gather"},
    "never_split": {"last": "rowwise_split_input"},
    "a_table_by_the_projection_of_its_block": {
        "blocks.1.rope": SliceOutput(-1),
        "blocks.*.ff.up": "colwise",
        "blocks.*.ff_context.down": "rowwise",
    },
}


@pytest.mark.parametrize("plan", READ.values(), ids=READ)
def test_a_split_output_is_taken(plan):
    assert resolve(Rest(), plan, 2).notes == []
