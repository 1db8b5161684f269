"""A style that is unknown or does not fit what its key names is an error with the key, before anything is moved."""

import pytest
from diffusers.hooks.tensor_parallel import PackedColwiseParallel as DiffusersPackedColwise
from torch.distributed.tensor.parallel import ColwiseParallel

from toy_plans import PAIR, check_refused, check_refused_on_meta, plus
from tp_layers import Divide, ShardParameter

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
    "a_parameter_of_a_module_that_is_sharded_too": (
        plus("blocks.*.up.weight", ShardParameter(0)),
        2,
        ["'blocks.*.up' and 'blocks.*.up.weight' both plan 'blocks.0.up.weight'"],
    ),
    "a_whole_parameter_of_a_module_that_is_sharded_too": (
        {"blocks.*.down.bias": ShardParameter(0), **PAIR},
        2,
        ["'blocks.*.down' and 'blocks.*.down.bias' both plan 'blocks.0.down.bias'"],
    ),
    "summed_gradients_of_a_parameter_that_is_sharded_too": (
        plus("blocks.*.down.bias", "replicated_with_grad_allreduce"),
        2,
        ["'blocks.*.down' and 'blocks.*.down.bias' both plan 'blocks.0.down.bias'"],
    ),
    "summed_gradients_of_a_module_with_shards": (
        plus("blocks.*", "replicated_with_grad_allreduce"),
        2,
        ["key 'blocks.*' sums the gradients of all of 'blocks.0'", "and 'blocks.*.up' shards 'blocks.0.up' within it"],
    ),
    "an_attribute_that_is_missing": (
        plus("blocks.*", Divide("n_heads")),
        2,
        ["plan key 'blocks.*' at 'blocks.0': Block.n_heads is None, not an integer to divide"],
    ),
    "an_attribute_that_is_a_float": (plus("blocks.*", Divide("ratio")), 2, ["Block.ratio is 0.5, not an integer"]),
    "an_attribute_that_is_a_bool": (plus("blocks.*", Divide("flag")), 2, ["Block.flag is True, not an integer"]),
    "one_of_several_attributes": (plus("blocks.*", Divide("groups", "ratio")), 2, ["Block.ratio is 0.5"]),
}


@pytest.mark.parametrize(("plan", "size", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_plan_is_refused(plan, size, message):
    check_refused(plan, size, message)


@pytest.mark.parametrize(("plan", "size", "message"), WRONG.values(), ids=WRONG)
def test_a_meta_model_is_refused_alike(plan, size, message):
    check_refused_on_meta(plan, size, message)
