"""Every way a plan can be wrong is an error with the key or parameter and the numbers, before anything is moved."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxTransformer2DModel, Lumina2Transformer2DModel
from diffusers.hooks.tensor_parallel import PackedColwiseParallel as DiffusersPackedColwise
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel

from tp_layers import Divide, PackedColwiseParallel, PackedRowwiseParallel, ShardParameter, SliceOutput, apply
from tp_layers.group import Group
from tp_layers.plans.resolve import resolve
from tp_layers.plans.shared import feed_forward, self_attention
from tp_layers.plans.spec import ShardSpec


@contextmanager
def refused(model, *message):
    """What runs within raises a ValueError with all parts of `message`, and leaves the model as it was."""
    modules, tensors = dict(model.named_modules()), model.state_dict(keep_vars=True)
    values = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    attributes = {path: {**vars(module)} for path, module in modules.items()}
    hooks = {path: (*module._forward_hooks, *module._forward_pre_hooks) for path, module in modules.items()}
    with pytest.raises(ValueError) as info:
        yield
    assert [part for part in message if part not in str(info.value)] == [], str(info.value)
    assert dict(model.named_modules()) == modules
    now = model.state_dict(keep_vars=True)
    assert list(now) == list(tensors)
    assert all(now[name] is tensors[name] and torch.equal(now[name].double(), values[name].double()) for name in now)
    for path, module in modules.items():
        assert vars(module).keys() == attributes[path].keys()
        assert [name for name, value in vars(module).items() if value is not attributes[path][name]] == []
        assert (*module._forward_hooks, *module._forward_pre_hooks) == hooks[path]


class OwnLinear(nn.Linear):
    def forward(self, x):
        return super().forward(x) / 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own = OwnLinear(8, 8)
        self.rms, self.layer_norm = nn.RMSNorm(8), nn.LayerNorm(8)
        self.over_two = nn.RMSNorm((2, 4))
        self.table = nn.Parameter(torch.ones(3, 8))
        self.groups, self.ratio, self.flag = 6, 0.5, True


class Toy(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))


PAIR = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


class Attention(nn.Module):
    """Projections of heads, with or without counts of its own."""

    def __init__(self, **counts):
        super().__init__()
        self.to_q, self.to_k, self.to_out = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        for name, value in counts.items():
            setattr(self, name, value)


class HeadModel(nn.Module):
    def __init__(self, config=None, own_config=None, **counts):
        super().__init__()
        self.attn = Attention(**counts)
        self.up, self.down = nn.Linear(24, 24), nn.Linear(24, 24)
        self.config = config
        if own_config is not None:
            self.attn.config = own_config


ATTENTION = {"attn.to_q": "colwise", "attn.to_k": "colwise", "attn.to_out": "rowwise"}
FFN = {"up": "colwise", "down": "rowwise"}


def packed(blocks):
    return {"blocks.*.up": PackedColwiseParallel(blocks), "blocks.*.down": "rowwise"}


def row_packed(blocks):
    return {"blocks.*.up": "colwise", "blocks.*.down": PackedRowwiseParallel(blocks)}


def plus(key, style):
    return {**PAIR, key: style}


WRONG = {
    "an_unknown_style": (
        plus("blocks.*.own", "columnwise"),
        2,
        ["plan key 'blocks.*.own'", "'columnwise'", "'colwise'"],
    ),
    "a_style_of_torch": (plus("blocks.*.own", ColwiseParallel()), 2, ["plan key 'blocks.*.own': unknown style"]),
    "a_class_in_place_of_its_instance": (
        plus("blocks.*.own", DiffusersPackedColwise),
        2,
        ["plan key 'blocks.*.own': unknown style"],
    ),
    "no_style": (plus("blocks.*.own", None), 2, ["unknown style None"]),
    "blocks_that_do_not_divide_the_rows": (
        packed([1, 1, 1]),
        2,
        ["'blocks.*.up' at 'blocks.0.up'", "the blocks [1, 1, 1] add up to 3, which does not divide 8"],
    ),
    "blocks_that_do_not_divide_the_columns": (
        row_packed([1, 2]),
        2,
        ["'blocks.*.down' at 'blocks.0.down'", "the blocks [1, 2] add up to 3, which does not divide 8"],
    ),
    "blocks_larger_than_the_rows": (packed([8, 8]), 2, ["add up to 16, which does not divide 8"]),
    "a_dim_of_one_block": (
        PAIR,
        3,
        [
            "'blocks.0.up.weight' (dim 0): a block of 8 is not divisible by 3",
            "sizes that work for this plan: 1, 2, 4, 8",
        ],
    ),
    "a_block_though_their_sum_divides": (
        packed([3, 1]),
        4,
        [
            "'blocks.0.up.weight' (dim 0 in blocks [6, 2]): a block of 6 is not divisible by 4 ranks",
            "sizes that work for this plan: 1, 2",
        ],
    ),
    "the_last_block_though_the_first_divides": (
        packed([2, 1, 1]),
        4,
        ["'blocks.0.up.weight' (dim 0 in blocks [4, 2, 2]): a block of 2 is not divisible by 4 ranks"],
    ),
    "a_block_of_columns": (
        row_packed([6, 2]),
        4,
        ["'blocks.0.down.weight' (dim 1 in blocks [6, 2]): a block of 6 is not divisible by 4 ranks"],
    ),
    "no_blocks_for_the_rows": (packed(None), 2, ["PackedColwiseParallel has no blocks", "`_tp_packed_col_blocks`"]),
    "no_blocks_for_the_columns": (
        row_packed(None),
        2,
        ["PackedRowwiseParallel has no blocks", "`_tp_packed_row_blocks`"],
    ),
    "an_empty_list_of_blocks": (packed([]), 2, ["PackedColwiseParallel has no blocks"]),
    "a_marker_of_diffusers_without_blocks": (
        packed(None) | {"blocks.*.up": DiffusersPackedColwise()},
        2,
        ["no blocks"],
    ),
    "a_block_of_zero": (packed([0, 1]), 2, ["'blocks.0.up': blocks must be positive integers, got [0, 1]"]),
    "a_negative_block": (packed([-1, 3]), 2, ["blocks must be positive integers, got [-1, 3]"]),
    "a_block_that_is_a_bool": (packed([True, True]), 2, ["blocks must be positive integers, got [True, True]"]),
    "a_block_that_is_no_integer": (packed([0.5, 1.5]), 2, ["blocks must be positive integers, got [0.5, 1.5]"]),
    "a_bad_block_from_a_function": (
        packed(lambda linear: [linear.out_features, 0]),
        2,
        ["blocks must be positive integers, got [8, 0]"],
    ),
    "a_linear_with_a_forward_of_its_own": (
        plus("blocks.*.own", "colwise"),
        2,
        ["'blocks.0.own': it is a OwnLinear, not a plain nn.Linear"],
    ),
    "a_style_of_linears_on_a_norm": (plus("blocks.*.rms", "rowwise"), 2, ["it is a RMSNorm, not a plain nn.Linear"]),
    "rms_norm_on_a_layer_norm": (
        plus("blocks.*.layer_norm", "rms_norm"),
        2,
        ["'blocks.0.layer_norm': 'rms_norm' shards torch.nn.RMSNorm and diffusers' RMSNorm, not LayerNorm"],
    ),
    "rms_norm_on_a_linear": (plus("blocks.*.own", "rms_norm"), 2, ["not OwnLinear"]),
    "rms_norm_over_two_dims": (plus("blocks.*.over_two", "rms_norm"), 2, ["over one dim, this one is over (2, 4)"]),
    "rms_norm_width": (
        {"blocks.*.rms": "rms_norm"},
        3,
        ["'blocks.0.rms.weight' (dim 0): a block of 8 is not divisible by 3", "1, 2, 4, 8"],
    ),
    "a_bare_parameter_with_a_style_of_modules": (
        plus("blocks.*.table", "colwise"),
        2,
        ["'blocks.0.table': it is a bare parameter: only ShardParameter(dim) shards one"],
    ),
    "a_module_with_the_style_of_parameters": (
        plus("blocks.*.own", ShardParameter(0)),
        2,
        ["'blocks.0.own': ShardParameter names a parameter, this is the module OwnLinear"],
    ),
    "a_parameter_without_that_dim": (
        plus("blocks.*.table", ShardParameter(2)),
        2,
        ["'blocks.0.table': it has shape (3, 8), without a dim 2"],
    ),
    "a_parameter_that_does_not_divide": (
        plus("blocks.*.table", ShardParameter(0)),
        2,
        ["'blocks.0.table' (dim 0): a block of 3 is not divisible by 2 ranks", "sizes that work for this plan: 1"],
    ),
    "a_parameter_of_a_module_that_is_sharded_too": (
        plus("blocks.*.up.weight", ShardParameter(0)),
        2,
        ["'blocks.*.up' and 'blocks.*.up.weight' both shard 'blocks.0.up.weight'"],
    ),
    "a_whole_parameter_of_a_module_that_is_sharded_too": (
        {"blocks.*.down.bias": ShardParameter(0), **PAIR},
        2,
        ["'blocks.*.down' and 'blocks.*.down.bias' both shard 'blocks.0.down.bias'"],
    ),
    "an_attribute_that_is_missing": (
        plus("blocks.*", Divide("n_heads")),
        2,
        ["plan key 'blocks.*' at 'blocks.0': Block.n_heads is None, not an integer to divide"],
    ),
    "an_attribute_that_is_a_float": (plus("blocks.*", Divide("ratio")), 2, ["Block.ratio is 0.5, not an integer"]),
    "an_attribute_that_is_a_bool": (plus("blocks.*", Divide("flag")), 2, ["Block.flag is True, not an integer"]),
    "one_of_several_attributes": (plus("blocks.*", Divide("groups", "ratio")), 2, ["Block.ratio is 0.5"]),
    "an_attribute_that_does_not_divide": (
        {"blocks.*": Divide("groups"), "blocks.*.down": "rowwise"},
        4,
        ["'blocks.0': groups of 6 is not divisible by 4 ranks", "sizes that work for this plan: 1, 2"],
    ),
    "size_zero": (PAIR, 0, ["the size must be at least 1, got 0"]),
    "a_negative_size": (PAIR, -1, ["the size must be at least 1, got -1"]),
}


@pytest.mark.parametrize(("plan", "size", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_plan_is_refused(plan, size, message):
    model = Toy()
    with refused(model, *message):
        apply(model, plan, group=Group(0, size))
    with refused(model, *message):
        resolve(model, plan, size)


@pytest.mark.parametrize(("plan", "size", "message"), WRONG.values(), ids=WRONG)
def test_a_meta_model_is_refused_alike(plan, size, message):
    with torch.device("meta"):
        model = Toy()
    with pytest.raises(ValueError) as info:
        resolve(model, plan, size)
    assert [part for part in message if part not in str(info.value)] == []


def test_divide_without_attributes_and_blocks_left_on_the_wrong_side():
    with pytest.raises(ValueError, match="Divide needs the names of attributes"):
        Divide()
    model = Toy()
    for block in model.blocks:
        block.up._tp_packed_row_blocks = [1, 1]
    with refused(model, "PackedColwiseParallel has no blocks"):
        resolve(model, packed(None), 2)


HEADS = {
    "heads_of_the_module": (
        {"heads": 3},
        None,
        2,
        ["'attn': heads of 3 is not divisible by 2 ranks", "sizes that work for this plan: 1, 3"],
    ),
    "num_heads": ({"num_heads": 3}, None, 2, ["'attn': num_heads of 3"]),
    "n_heads": ({"n_heads": 3}, None, 2, ["'attn': n_heads of 3"]),
    "num_attention_heads": ({"num_attention_heads": 3}, None, 2, ["'attn': num_attention_heads of 3"]),
    "kv_heads_of_the_module": ({"heads": 6, "kv_heads": 1}, None, 2, ["'attn': kv_heads of 1"]),
    "fewer_kv_heads_than_ranks": (
        {"num_heads": 8, "num_key_value_heads": 2},
        None,
        4,
        ["'attn': num_key_value_heads of 2 is not divisible by 4 ranks", "work for this plan: 1, 2"],
    ),
    "kv_heads_by_their_width": (
        {"heads": 12, "inner_dim": 24, "inner_kv_dim": 4},
        None,
        4,
        ["'attn': kv_heads of 2 is not divisible by 4 ranks", "work for this plan: 1, 2"],
    ),
    "heads_of_the_config": ({}, {"num_attention_heads": 3}, 2, ["the model's num_attention_heads of 3"]),
    "kv_heads_of_the_config": (
        {},
        {"num_attention_heads": 8, "num_key_value_heads": 2},
        4,
        ["the model's num_key_value_heads of 2 is not divisible by 4 ranks"],
    ),
}


@pytest.mark.parametrize(("counts", "config", "size", "message"), HEADS.values(), ids=HEADS)
def test_heads_that_do_not_divide_are_refused_where_the_width_does(counts, config, size, message):
    model = HeadModel(config and SimpleNamespace(**config), **counts)
    with refused(model, *message):
        apply(model, {**ATTENTION, **FFN}, group=Group(0, size))


@pytest.mark.parametrize(("counts", "config", "size", "message"), HEADS.values(), ids=HEADS)
def test_a_plan_of_the_feed_forward_alone_is_not_refused_because_of_heads(counts, config, size, message):
    model = HeadModel(config and SimpleNamespace(**config), **counts)
    resolved = resolve(model, FFN, size)
    assert set(resolved.specs) == {"up.weight", "up.bias", "down.weight"}
    assert resolved.sizes == [1, 2, 3, 4, 6, 8, 12, 24]


def test_heads_do_not_matter_where_none_are_split():
    assert resolve(HeadModel(heads=3), {"attn.to_out": "rowwise_split_input"}, 2).sizes == [1, 2, 3, 4, 6, 8, 12, 24]


def test_the_modules_own_count_stands_before_the_configs():
    """One stack of a model may have other heads than its config says."""
    model = HeadModel(SimpleNamespace(num_attention_heads=3), heads=4)
    assert resolve(model, ATTENTION, 2).sizes == [1, 2, 4]
    model = HeadModel(SimpleNamespace(num_attention_heads=3), own_config=SimpleNamespace(num_attention_heads=4))
    assert resolve(model, ATTENTION, 2).sizes == [1, 2, 4]


def test_heads_of_models_of_diffusers():
    with torch.device("meta"):
        flux = FluxTransformer2DModel(num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=3)
        lumina = Lumina2Transformer2DModel(
            hidden_size=32, num_layers=1, num_refiner_layers=1, num_attention_heads=4, num_kv_heads=2
        )
    with pytest.raises(ValueError, match="heads of 3 is not divisible by 2 ranks; sizes that work for this plan: 1, 3"):
        resolve(flux, self_attention("transformer_blocks.*.attn"), 2)
    assert resolve(flux, feed_forward("transformer_blocks.*.ff"), 2).notes == []
    assert resolve(lumina, self_attention("layers.*.attn"), 2).sizes == [1, 2]
    with pytest.raises(ValueError, match=r"'layers\.0\.attn': kv_heads of 2 is not divisible by 4 ranks"):
        resolve(lumina, self_attention("layers.*.attn"), 4)


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
