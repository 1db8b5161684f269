"""diffusers' own tensor-parallel calls refuse what they always refuse."""

import copy

import pytest
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel
from diffusers.hooks import group_offloading
from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig, TensorParallelConfig
from torch import nn

import enable_case
import tp_layers
from checkpoints import identical
from families import FAMILIES
from test_refuse_diffusers import Pipeline
from toy import Toy
from tp_layers.plans.shard import sharding_of

FLUX2 = FAMILIES["Flux2Transformer2DModel"]
CONFIG = TensorParallelConfig(tp_degree=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny FLUX.2, in several files."""
    made = tmp_path_factory.mktemp("flux2")
    FLUX2.build().save_pretrained(made, max_shard_size="50KB")
    return made


@pytest.fixture
def one(tmp_path):
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def enabled():
    with tp_layers.diffusers.enable():
        yield


def load(folder, **arguments):
    return Flux2Transformer2DModel.from_pretrained(folder, **{"parallel_config": CONFIG, **arguments})


# In the words of diffusers' own checks.
DIFFUSERS_OWN = {
    "device_map": ({"device_map": "cpu"}, "`device_map` cannot be combined with a tensor-parallel `parallel_config`"),
    "quantization_config": ({"quantization_config": object()}, "`quantization_config` cannot be combined"),
    "low_cpu_mem_usage": ({"low_cpu_mem_usage": False}, "`low_cpu_mem_usage=False` cannot be combined"),
    "use_flashpack": ({"use_flashpack": True}, "`use_flashpack=True` cannot be combined"),
    "use_safetensors": ({"use_safetensors": False}, "`use_safetensors=False` cannot be combined"),
    "degree": ({"parallel_config": TensorParallelConfig(tp_degree=2)}, "degree (2) cannot exceed the world size (1)"),
}
OUR_OWN = {
    "ignore_mismatched_sizes": ({"ignore_mismatched_sizes": True}, "would stay without values"),
    "proxies": ({"proxies": {"https": "nowhere"}}, "HTTPS_PROXY"),
    "max_memory": ({"max_memory": {0: "1GB"}}, "it goes with device_map"),
    "offload_folder": ({"offload_folder": "there"}, "it goes with device_map"),
    "offload_state_dict": ({"offload_state_dict": True}, "it goes with device_map"),
    "flashpack_kwargs": ({"flashpack_kwargs": {"a": 1}}, "cannot be read in slices"),
    "an entry of the config": ({"guidance_embeds": False}, "`guidance_embeds` cannot be combined with a tensor-par"),
    "dtype": ({"torch_dtype": "auto"}, "dtype must be a floating-point dtype such as torch.bfloat16, got 'auto'"),
}


@pytest.mark.parametrize(("arguments", "message"), (DIFFUSERS_OWN | OUR_OWN).values(), ids=DIFFUSERS_OWN | OUR_OWN)
def test_an_argument_is_refused_before_anything_is_read(one, folder, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.nn.Module, "__init__", lambda self: pytest.fail("a model is being made"))
    with pytest.raises(ValueError) as info:
        load(folder, **arguments)
    assert message in str(info.value)


def test_a_pickled_checkpoint_is_refused(one, tmp_path):
    FLUX2.build().save_pretrained(tmp_path, safe_serialization=False)
    with pytest.raises((ValueError, FileNotFoundError), match="safetensors"):
        load(tmp_path)


def test_a_quantised_checkpoint_is_refused(one, tmp_path):
    model = FLUX2.build()
    model.register_to_config(quantization_config={"quant_method": "bitsandbytes"})
    model.save_config(tmp_path)
    with pytest.raises(ValueError, match="has a quantization_config"):
        load(tmp_path)


def states():
    def offloaded(model, monkeypatch):
        monkeypatch.setattr(group_offloading, "_is_group_offload_enabled", lambda module: True)

    def adapted(model, monkeypatch):
        class BaseTunerLayer(nn.Module):
            pass

        model.adapter = BaseTunerLayer()

    def hooked(model, monkeypatch):
        model.proj_out._hf_hook = object()

    return {
        "quantised": (lambda model, _: setattr(model, "is_quantized", True), "is quantized, which cannot be combined"),
        "quantiser": (lambda model, _: setattr(model, "hf_quantizer", object()), "is quantized, which cannot be com"),
        "device map": (lambda model, _: setattr(model, "hf_device_map", {"": 0}), "is placed by accelerate"),
        "accelerate": (hooked, "is placed by accelerate"),
        "group offloading": (offloaded, "has group offloading enabled"),
        "adapter": (adapted, "carries an adapter (LoRA)"),
        "compiled": (lambda model, _: model.compile(), "is compiled"),
    }


@pytest.mark.parametrize(("change", "message"), states().values(), ids=states())
def test_a_model_in_such_a_state_is_refused_and_left_as_it_is(one, monkeypatch, change, message):
    model = FLUX2.build()
    change(model, monkeypatch)
    before = dict(model.named_parameters())
    with pytest.raises(ValueError) as info:
        model.enable_parallelism(config=CONFIG)
    assert message in str(info.value)
    assert model._parallel_config is None and sharding_of(model) is None
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


def test_a_second_time_is_refused(one, folder):
    model = load(folder)
    with pytest.raises(RuntimeError, match="Parallelism is already applied to this Flux2Transformer2DModel"):
        model.enable_parallelism(config=CONFIG)


def test_both_kinds_of_parallelism_are_refused(one, folder):
    both = ParallelConfig(tensor_parallel_config=TensorParallelConfig())
    both.context_parallel_config = ContextParallelConfig(ulysses_degree=2)
    for call in (lambda: load(folder, parallel_config=both), lambda: FLUX2.build().enable_parallelism(config=both)):
        with pytest.raises(ValueError, match="Combining context parallelism and tensor parallelism"):
            call()
    with pytest.raises(ValueError, match="`cp_plan` is for context parallelism"):
        FLUX2.build().enable_parallelism(config=CONFIG, cp_plan={})


def test_without_a_process_group_both_calls_are_refused(folder):
    for call in (lambda: load(folder), lambda: FLUX2.build().enable_parallelism(config=CONFIG)):
        with pytest.raises(RuntimeError, match="must be available and initialized before"):
            call()


def test_a_class_without_a_plan_is_refused(one):
    with pytest.raises(ValueError, match=r"no plan for Toy: .* call tp_layers.register with its name"):
        Toy().enable_parallelism(config=CONFIG)


def test_heads_that_the_degree_does_not_divide_are_refused(ranks, folder):
    told = ranks(3, enable_case.on_a_mesh, folder)
    assert set(told) == {"`tp_degree` (3) must divide the number of attention heads (4)."}


@pytest.mark.parametrize(
    ("change", "first", "second"),
    [
        (enable_case.mapped_on_one, "OtherRankError: rank 1 of 4 failed: ValueError: `device_map`", "ValueError: `dev"),
        (enable_case.two_of_four, "ValueError: `tp_degree` (2) is less than the world size (4)", "ValueError: `tp_deg"),
    ],
    ids=["device map", "fewer than all ranks"],
)
def test_all_ranks_refuse_what_one_does(ranks, folder, change, first, second):
    told = ranks(4, enable_case.on_one, change, folder)
    assert told[0].startswith(first) and told[1].startswith(second)
    assert told[2] == told[3] == told[0]


def test_all_ranks_refuse_a_model_that_is_quantised_on_one(ranks):
    told = ranks(4, enable_case.quantised_on_one)
    assert told[1].startswith("'Flux2Transformer2DModel' is quantized")
    assert all(it.startswith("rank 1 of 4 failed: ValueError: 'Flux2") for it in (told[0], told[2], told[3]))


AFTERWARDS = {
    "save_pretrained": (NotImplementedError, lambda model: model.save_pretrained("nowhere")),
    "load_lora_adapter": (NotImplementedError, lambda model: model.load_lora_adapter({})),
    "enable_group_offload": (NotImplementedError, lambda model: model.enable_group_offload(torch.device("cpu"))),
    "enable_model_cpu_offload": (ValueError, lambda model: Pipeline(model).enable_model_cpu_offload(device="cpu")),
}


@pytest.mark.parametrize(("kind", "call"), AFTERWARDS.values(), ids=AFTERWARDS)
def test_the_model_refuses_afterwards_what_diffusers_refuses(one, folder, kind, call):
    with pytest.raises(kind, match="sharded"):
        call(load(folder))


def test_a_sharded_model_can_be_copied(one, folder):
    model = load(folder)
    assert identical(copy.deepcopy(model).state_dict(), model.state_dict())
