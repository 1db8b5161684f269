"""What cannot be sharded right is refused before it is touched, and what sharding does not spoil is not."""

from types import SimpleNamespace

import pytest
import torch
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from refused import OwnLinear, refused
from tp_layers import Divide, ShardParameter, SliceOutput, apply
from tp_layers.group import Group

TWO = Group(0, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 8)
        self.rest, self.rope, self.heads = nn.Linear(8, 8), nn.Identity(), 4
        self.scale = nn.Parameter(torch.ones(8))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


PLAN = {
    "blocks.*.up": "colwise",
    "blocks.*.norm": "rms_norm",
    "blocks.*.down": "rowwise",
    "blocks.*.scale": ShardParameter(0),
    "blocks.*.rope": SliceOutput(-1),
    "blocks.*": Divide("heads"),
}


class BaseTunerLayer:
    """Stands for the base class of an adapter library, which is known by its name."""


class LoraLinear(nn.Linear, BaseTunerLayer):
    pass


class Calling(nn.Linear):
    def __call__(self, x):
        return 2 * super().__call__(x)


class Packed(torch.Tensor):
    """A weight in a layout of its own."""


class Double(nn.Module):
    def forward(self, x):
        return 2 * x


def parameter_of_subclass():
    return nn.Parameter(torch.ones(8, 8).as_subclass(Packed), requires_grad=False)


def integer_parameter():
    return nn.Parameter(torch.ones(8, 8, dtype=torch.int8), requires_grad=False)


def set_on(path, name, value):
    return lambda model: setattr(model.get_submodule(path), name, value() if callable(value) else value)


def call_on(path, function):
    return lambda model: function(model.get_submodule(path))


ONE, REST = "blocks.1.up", "blocks.1.rest"
# What is done to the model, and what the refusal says.
STATES = {
    "sharded_by_this_package": (
        lambda model: apply(model, PLAN, group=Group()),
        ["cannot shard this Toy: it is sharded already", "tp_layers.save"],
    ),
    "sharded_by_diffusers": (
        set_on("", "_parallel_config", ParallelConfig(tensor_parallel_config=TensorParallelConfig())),
        ["diffusers has sharded it already", "parallel_config"],
    ),
    "marked_as_quantised": (set_on("", "is_quantized", True), ["it is quantised", "load it unquantised"]),
    "with_a_quantiser": (set_on("", "hf_quantizer", SimpleNamespace()), ["it is quantised", "load it unquantised"]),
    "a_linear_of_a_quantiser": (
        set_on("blocks.1", "up", lambda: OwnLinear(8, 8)),
        ["'blocks.1.up': it is a OwnLinear, not a plain nn.Linear"],
    ),
    "a_linear_with_a_call_of_its_own": (
        set_on("blocks.1", "up", lambda: Calling(8, 8)),
        ["'blocks.1.up': it is a Calling, not a plain nn.Linear"],
    ),
    "an_integer_weight": (
        set_on(ONE, "weight", integer_parameter),
        ["'blocks.1.up.weight' is a Tensor of torch.int8, not a plain floating-point tensor"],
    ),
    "a_weight_of_a_tensor_subclass": (
        set_on(ONE, "weight", parameter_of_subclass),
        ["'blocks.1.up.weight' is a Packed of torch.float32, not a plain floating-point tensor"],
    ),
    "offloaded_by_accelerate": (set_on(REST, "_hf_hook", SimpleNamespace()), ["accelerate offloads 'blocks.1.rest'"]),
    "placed_by_a_device_map": (set_on("", "hf_device_map", lambda: {"": "cpu"}), ["accelerate has placed it"]),
    "an_adapter": (
        set_on("blocks.1", "rest", lambda: LoraLinear(8, 8)),
        ["'blocks.1.rest' carries an adapter (LoRA)", "fuse or unload it first"],
    ),
    "a_compiled_block": (
        lambda model: model.blocks.__setitem__(1, torch.compile(model.blocks[1])),
        ["'blocks.1' is compiled; shard first"],
    ),
    "a_block_compiled_in_place": (call_on("blocks.1", nn.Module.compile), ["'blocks.1' is compiled; shard first"]),
    "the_model_compiled_in_place": (call_on("", nn.Module.compile), ["it is compiled; shard first"]),
    "weight_norm": (
        call_on(ONE, parametrizations.weight_norm),
        ["'blocks.1.up' is parametrised, its 'weight' is computed", "remove the parametrisation"],
    ),
    "a_parametrised_weight": (
        call_on("blocks.1.down", lambda module: parametrize.register_parametrization(module, "weight", Double())),
        ["'blocks.1.down' is parametrised, its 'weight' is computed"],
    ),
    "a_parametrised_bias_of_a_colwise": (
        call_on(ONE, lambda module: parametrize.register_parametrization(module, "bias", Double())),
        ["'blocks.1.up' is parametrised, its 'bias' is computed"],
    ),
    "a_parametrised_bias_of_a_rowwise": (
        call_on("blocks.1.down", lambda module: parametrize.register_parametrization(module, "bias", Double())),
        ["'blocks.1.down' is parametrised, its 'bias' is computed"],
    ),
    "a_parametrised_norm": (
        call_on("blocks.1.norm", lambda module: parametrize.register_parametrization(module, "weight", Double())),
        ["'blocks.1.norm'", "'rms_norm' shards torch.nn.RMSNorm and diffusers' RMSNorm, not ParametrizedRMSNorm"],
    ),
    "a_parametrised_bare_parameter": (
        call_on("blocks.1", lambda module: parametrize.register_parametrization(module, "scale", Double())),
        ["'blocks.1.scale' is parametrised, so it is computed"],
    ),
    "weight_norm_by_a_hook": (call_on(ONE, weight_norm), ["'blocks.1.up' is parametrised, its 'weight' is computed"]),
    "spectral_norm_by_a_hook": (call_on(ONE, spectral_norm), ["'blocks.1.up' is parametrised"]),
    "bias_norm_by_a_hook": (
        call_on("blocks.1.down", lambda module: weight_norm(module, "bias", dim=None)),
        ["'blocks.1.down' has hooks"],
    ),
    "a_forward_hook": (
        call_on(ONE, lambda module: module.register_forward_hook(lambda *args: None)),
        ["'blocks.1.up' has hooks, which its sharded layer would drop"],
    ),
    "a_forward_pre_hook": (
        call_on("blocks.1.down", lambda module: module.register_forward_pre_hook(lambda *args: None)),
        ["'blocks.1.down' has hooks"],
    ),
    "a_backward_hook": (
        call_on(ONE, lambda module: module.register_full_backward_hook(lambda *args: None)),
        ["'blocks.1.up' has hooks"],
    ),
    "a_backward_pre_hook": (
        call_on("blocks.1.norm", lambda module: module.register_full_backward_pre_hook(lambda *args: None)),
        ["'blocks.1.norm' has hooks"],
    ),
    "a_forward_put_on_the_module": (
        lambda model: setattr(model.blocks[1].up, "forward", torch.relu),
        ["'blocks.1.up' has a forward of its own"],
    ),
    "a_bias_that_is_no_parameter": (
        lambda model: (delattr(model.blocks[1].down, "bias"), setattr(model.blocks[1].down, "bias", torch.ones(4))),
        ["the bias of 'blocks.1.down' is a Tensor, not a parameter"],
    ),
    "a_further_parameter": (
        lambda model: setattr(model.blocks[1].up, "gain", nn.Parameter(torch.ones(1))),
        ["'blocks.1.up' has ['gain'] beside its weight and bias"],
    ),
    "a_further_buffer": (
        call_on(ONE, lambda module: module.register_buffer("input_scale", torch.ones(1))),
        ["'blocks.1.up' has ['input_scale'] beside"],
    ),
    "tied_weights_that_are_cut_otherwise": (
        lambda model: setattr(model.blocks[1].down, "weight", model.blocks[0].up.weight),
        ["'blocks.0.up.weight' is tied to ['blocks.1.down.weight']", "untie it", "or cut them alike"],
    ),
    "tied_to_a_module_outside_the_plan": (
        lambda model: setattr(model.blocks[1].rest, "weight", model.blocks[1].down.weight),
        ["'blocks.1.down.weight' is tied to ['blocks.1.rest.weight']"],
    ),
    "a_tied_bare_parameter": (
        lambda model: setattr(model.blocks[1].rest, "bias", model.blocks[1].scale),
        ["'blocks.1.scale' is tied to ['blocks.1.rest.bias']"],
    ),
    "a_module_shared_by_two_blocks": (
        lambda model: setattr(model.blocks[1], "rope", model.blocks[0].rope),
        ["'blocks.0.rope' and 'blocks.1.rope' are one and the same"],
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*script_method. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(("change", "message"), STATES.values(), ids=STATES)
def test_a_model_in_such_a_state_is_refused(change, message):
    model = Toy()
    change(model)
    with refused(model, *message):
        apply(model, PLAN, group=TWO)


READERS = {
    "encoder": (lambda: nn.TransformerEncoderLayer(8, 2, 16), {"0.linear1": "colwise", "0.linear2": "rowwise"}),
    "attention": (lambda: nn.MultiheadAttention(8, 2), {"0.out_proj": "rowwise_split_input"}),
}


@pytest.mark.parametrize(("build", "plan"), READERS.values(), ids=READERS)
def test_a_module_that_does_not_call_its_layers_is_refused(build, plan):
    """Its output would be a partial sum, in evaluation alone, and without the hooks that a check would set."""
    model = nn.Sequential(build()).eval()
    with refused(model, f"'0' is torch's {type(model[0]).__name__}, which reads the weights of '0.", "leave it out"):
        apply(model, plan, group=TWO)


def test_a_compiled_model_is_refused():
    model = torch.compile(Toy())
    with refused(model, "cannot shard this OptimizedModule: it is compiled; shard first"):
        apply(model, PLAN, group=TWO)


HARMLESS = {
    "weight_norm_outside_the_plan": call_on(REST, parametrizations.weight_norm),
    "a_tie_outside_the_plan": lambda model: setattr(model.blocks[1].rest, "weight", model.blocks[0].rest.weight),
    "an_integer_weight_outside_the_plan": set_on(REST, "weight", integer_parameter),
    "a_hook_on_what_stays": call_on(REST, lambda module: module.register_forward_hook(lambda *args: None)),
    "a_hook_on_a_divided_block": call_on("blocks.1", lambda module: module.register_forward_hook(lambda *args: None)),
    "a_hook_on_a_sliced_table": call_on(
        "blocks.1.rope", lambda module: module.register_forward_hook(lambda *args: None)
    ),
    "a_tied_bias_of_a_rowwise": lambda model: setattr(model.blocks[1].rest, "bias", model.blocks[1].down.bias),
    "no_parallelism_of_diffusers": set_on("", "_parallel_config", ParallelConfig()),
    "no_quantiser": set_on("", "is_quantized", False),
}


@pytest.mark.parametrize("change", HARMLESS.values(), ids=HARMLESS)
def test_what_sharding_does_not_spoil_is_not_refused(change):
    model = Toy()
    change(model)
    rest = model.blocks[1].rest
    assert apply(model, PLAN, group=Group()) is model
    assert model.blocks[1].rest is rest
