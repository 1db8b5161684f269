"""What diffusers does to a model is refused where it would go wrong: before sharding, and on a sharded model."""

import copy

import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.hooks import apply_group_offloading
from diffusers.models._modeling_parallel import TensorParallelConfig

from families import FAMILIES
from refused import refused
from tp_layers import apply
from tp_layers.group import Group

FLUX = FAMILIES["FluxTransformer2DModel"]
TWO = Group(0, 2)


def group_offload(offload_type):
    device = torch.device("cpu")
    blocks = {"num_blocks_per_group": 1} if offload_type == "block_level" else {}
    return lambda model: apply_group_offloading(
        model, onload_device=device, offload_device=device, offload_type=offload_type, **blocks
    )


DIFFUSERS_HOOKS = {
    "group_offloading_by_block": (group_offload("block_level"), "it has diffusers' hook 'group_offloading'"),
    "group_offloading_by_leaf": (group_offload("leaf_level"), "has diffusers' hook 'group_offloading'"),
    "layerwise_casting": (
        lambda model: model.enable_layerwise_casting(torch.float8_e4m3fn, torch.float32),
        "has diffusers' hook 'layerwise_casting'",
    ),
}


@pytest.mark.parametrize(("change", "message"), DIFFUSERS_HOOKS.values(), ids=DIFFUSERS_HOOKS)
def test_a_model_that_diffusers_offloads_or_casts_is_refused(change, message):
    model = FLUX.build()
    change(model)
    with refused(model, message, "disable it first"):
        apply(model, group=TWO)


def sharded_flux():
    return apply(FLUX.build(), group=Group())


METHODS = {
    "save_pretrained": (lambda model: model.save_pretrained("nowhere"), "tp_layers.save(model, path) on all ranks"),
    "push_to_hub": (lambda model: model.push_to_hub("nobody/nothing"), "tp_layers.save(model, path)"),
    "add_adapter": (lambda model: model.add_adapter(None), "call tp_layers.load_adapter(model, path)"),
    "load_lora_adapter": (lambda model: model.load_lora_adapter({}), "call tp_layers.load_adapter(model, path)"),
    "set_adapters": (lambda model: model.set_adapters("a"), "call tp_layers.set_adapters(model, names, scales)"),
    "disable_lora": (lambda model: model.disable_lora(), "call tp_layers.set_adapters(model, names, scales)"),
    "fuse_lora": (lambda model: model.fuse_lora(), "adapters=[(path, scale)] to tp_layers.load"),
    "unload_lora": (lambda model: model.unload_lora(), "call tp_layers.unload_adapter(model, name)"),
    "delete_adapters": (lambda model: model.delete_adapters("a"), "call tp_layers.unload_adapter(model, name)"),
    "enable_group_offload": (lambda model: model.enable_group_offload(torch.device("cpu")), "cannot be offloaded"),
    "enable_layerwise_casting": (lambda model: model.enable_layerwise_casting(), "load with dtype= instead"),
}


@pytest.mark.parametrize("copied", [False, True], ids=["sharded", "copied"])
@pytest.mark.parametrize(("call", "message"), METHODS.values(), ids=METHODS)
def test_a_sharded_model_refuses_what_would_go_wrong(call, message, copied):
    model = copy.deepcopy(sharded_flux()) if copied else sharded_flux()
    with pytest.raises(NotImplementedError) as info:
        call(model)
    assert "this model is sharded by tp_layers, so it cannot" in str(info.value)
    assert message in str(info.value)


def test_the_class_and_other_models_are_not_touched():
    sharded_flux()
    other = FLUX.build()
    assert other._parallel_config is None
    assert type(other.save_pretrained).__name__ == "method"


def test_a_sharded_model_refuses_the_parallelism_of_diffusers():
    with pytest.raises(RuntimeError, match="Parallelism is already applied"):
        sharded_flux().enable_parallelism(config=TensorParallelConfig())


class Pipeline(DiffusionPipeline):
    model_cpu_offload_seq = "transformer"

    def __init__(self, transformer):
        super().__init__()
        self.register_modules(transformer=transformer)


PIPELINE_CALLS = {
    "enable_model_cpu_offload": lambda pipeline: pipeline.enable_model_cpu_offload(device="cpu"),
    "enable_sequential_cpu_offload": lambda pipeline: pipeline.enable_sequential_cpu_offload(device="cpu"),
}


@pytest.mark.parametrize("call", PIPELINE_CALLS.values(), ids=PIPELINE_CALLS)
def test_a_pipeline_does_not_offload_a_sharded_component(call):
    with pytest.raises(ValueError, match="'FluxTransformer2DModel' is sharded with tensor parallelism, so it cannot"):
        call(Pipeline(sharded_flux()))


def test_a_pipeline_does_not_offload_a_sharded_component_by_groups():
    with pytest.raises(NotImplementedError, match="so it cannot be offloaded"):
        Pipeline(sharded_flux()).enable_group_offload(torch.device("cpu"))


def test_a_pipeline_is_not_saved_by_each_rank(tmp_path):
    with pytest.raises(NotImplementedError, match="so it cannot be saved by each rank"):
        Pipeline(sharded_flux()).save_pretrained(tmp_path)
