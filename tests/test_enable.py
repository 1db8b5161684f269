"""diffusers' own tensor-parallel calls, carried out by this package: the same numbers, and only this rank's share."""

import inspect
import subprocess
import sys

import diffusers.configuration_utils
import pytest
import torch
import torch.distributed as dist
from diffusers import Flux2Transformer2DModel
from diffusers.models._modeling_parallel import ContextParallelConfig, TensorParallelConfig
from diffusers.models.modeling_utils import ModelMixin

import enable_case
import tp_layers
from checkpoints import identical, state_of
from close import FLOAT32, compare
from fake_hub import FakeHub
from families import FAMILIES, REGISTERED, run
from test_peer import PLANNED
from tp_layers.launch import Ranks
from tp_layers.plans.shard import sharding_of

NAMES = ("from_pretrained", "enable_parallelism")
FLUX2 = FAMILIES["Flux2Transformer2DModel"]


@pytest.fixture(scope="module")
def pair():
    """Two ranks that are the whole world, as `tp_degree` wants them."""
    with Ranks(2, timeout=120) as ranks:
        yield ranks


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


def originals():
    return {name: vars(ModelMixin)[name] for name in NAMES}


@pytest.mark.parametrize("name", PLANNED)
def test_diffusers_test_procedure_passes_for_its_four_classes(pair, name):
    full = FAMILIES[name].build()
    results = pair.run(enable_case.procedure, name, full.state_dict())
    assert compare(results, run(full, FAMILIES[name].inputs())) <= FLOAT32


def test_those_are_all_the_classes_that_diffusers_has_a_plan_for():
    classes = [getattr(diffusers, name) for name in dir(diffusers) if name.endswith("Model")]
    assert {cls.__name__ for cls in classes if getattr(cls, "_tp_plan", None)} == set(PLANNED)


@pytest.mark.parametrize("way", ["in a ParallelConfig", "mesh"])
def test_a_config_may_be_written_in_several_ways(pair, way):
    full = FLUX2.build()
    results = pair.run(enable_case.procedure, FLUX2.name, full.state_dict(), way)
    assert compare(results, run(full, FLUX2.inputs())) <= FLOAT32


def test_a_class_without_a_plan_in_diffusers_is_sharded_by_the_one_it_has_here(pair):
    family = REGISTERED["WanTransformer3DModel, text to video"]
    assert family.cls._tp_plan is None
    full = family.build()
    results = pair.run(enable_case.procedure, family.label, full.state_dict())
    assert compare(results, run(full, family.inputs())) <= FLOAT32


@pytest.mark.parametrize("way", ["tp_degree", "in a ParallelConfig", "mesh", "AutoModel"])
def test_from_pretrained_reads_this_ranks_share_alone(pair, folder, way):
    results = pair.run(enable_case.loaded, FLUX2.name, folder, way, {})
    wanted = run(FLUX2.build(), FLUX2.inputs())
    assert compare([(it["outputs"], it["digest"]) for it in results], wanted) <= FLOAT32
    full = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    for it in results:
        assert it["sharding"] and not it["training"] and it["devices"] == {"cpu"} and it["name"] == str(folder)
        assert it["report"].bytes_held == it["held"] < 0.7 * full
        assert it["report"].bytes_read < 0.8 * full


def test_dtype_and_subfolder_arrive(pair, folder):
    options = {"torch_dtype": torch.bfloat16, "subfolder": folder.name, "use_safetensors": True, "disable_mmap": True}
    options |= {"low_cpu_mem_usage": True, "local_files_only": True, "max_memory": None, "token": None}
    for it in pair.run(enable_case.loaded, FLUX2.name, folder.parent, "tp_degree", options):
        assert it["dtypes"] == {torch.bfloat16}


def test_without_a_dtype_it_is_that_of_diffusers_own_call(one, tmp_path):
    FLUX2.build(dtype=torch.bfloat16).save_pretrained(tmp_path)
    wanted = {parameter.dtype for parameter in FLUX2.cls.from_pretrained(tmp_path).parameters()}
    with tp_layers.diffusers.enable():
        model = FLUX2.cls.from_pretrained(tmp_path, parallel_config=TensorParallelConfig())
    assert {parameter.dtype for parameter in model.parameters()} == wanted


def test_a_variant_arrives(one, tmp_path):
    FLUX2.build().save_pretrained(tmp_path, variant="fp16")
    with tp_layers.diffusers.enable():
        assert sharding_of(FLUX2.cls.from_pretrained(tmp_path, variant="fp16", parallel_config=TensorParallelConfig()))
        with pytest.raises(FileNotFoundError, match="fp16"):
            FLUX2.cls.from_pretrained(tmp_path, parallel_config=TensorParallelConfig())


def test_a_model_loaded_sharded_is_saved_by_tp_layers_alone(pair, folder, tmp_path):
    for told in pair.run(enable_case.saved, folder, tmp_path / "saved"):
        assert "tp_layers.save(model, path) on all ranks" in told
    assert identical(state_of(tmp_path / "saved"), state_of(folder))


def test_at_size_one_the_bits_are_those_of_the_full_model(one, folder):
    wanted = run(FLUX2.build(), FLUX2.inputs())
    with tp_layers.diffusers.enable():
        loaded, info = Flux2Transformer2DModel.from_pretrained(
            folder, parallel_config=TensorParallelConfig(), output_loading_info=True
        )
        made = FLUX2.build()
        made.enable_parallelism(config=TensorParallelConfig(tp_degree=1))
    assert not any(info.values()) and set(info) >= {"missing_keys", "unexpected_keys", "mismatched_keys"}
    for model in (loaded, made):
        assert sharding_of(model) is not None
        assert all(torch.equal(*both) for both in zip(run(model, FLUX2.inputs()), wanted, strict=True))


def test_disable_restores_what_was_there(folder):
    before = originals()
    tp_layers.diffusers.enable()
    during = originals()
    assert all(during[name] is not before[name] for name in NAMES)
    assert all(inspect.unwrap(getattr(ModelMixin, name)).__name__ == name for name in NAMES)
    # A second time, and the end of that one's scope, change nothing.
    with tp_layers.diffusers.enable():
        assert originals() == during
    assert originals() == during
    tp_layers.diffusers.disable()
    assert all(originals()[name] is before[name] for name in NAMES)
    tp_layers.diffusers.disable()
    assert all(originals()[name] is before[name] for name in NAMES)
    with pytest.raises(ZeroDivisionError), tp_layers.diffusers.enable():
        raise ZeroDivisionError
    assert all(originals()[name] is before[name] for name in NAMES)


def test_other_calls_are_diffusers_own(one, folder):
    theirs = originals()["from_pretrained"].__get__(None, Flux2Transformer2DModel)(folder)
    with tp_layers.diffusers.enable():
        model = Flux2Transformer2DModel.from_pretrained(folder)
        assert sharding_of(model) is None and model._parallel_config is None
        assert identical(model.state_dict(), theirs.state_dict())
        # It divides by the number of accelerators, which a CPU has none of.
        if not torch.accelerator.is_available():
            with pytest.raises((ZeroDivisionError, RuntimeError)):
                model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))


def test_nothing_is_patched_or_imported_by_the_import():
    code = (
        "import sys, tp_layers, tp_layers.diffusers as ours; assert 'diffusers' not in sys.modules; import diffusers; "
        "from diffusers.models.modeling_utils import ModelMixin; assert diffusers is not ours; "
        "assert all(f.__module__ == ModelMixin.__module__ and 'tp_layers' not in f.__code__.co_filename "
        "for f in (ModelMixin.from_pretrained.__func__.__wrapped__, ModelMixin.enable_parallelism))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_what_the_hubs_client_takes_is_handed_on(one, folder, tmp_path, monkeypatch):
    hub = FakeHub(monkeypatch, folder.parent, tmp_path / "cache")
    monkeypatch.setattr(diffusers.configuration_utils, "hf_hub_download", fetch := FakeConfig(hub))
    options = {"cache_dir": "there", "token": "secret", "local_files_only": True, "force_download": True}
    arguments = {"subfolder": folder.name, "revision": "v1", "parallel_config": TensorParallelConfig(), **options}
    with tp_layers.diffusers.enable():
        model = FLUX2.cls.from_pretrained("nobody/flux2", **arguments)
        first = list(hub.got)
        FLUX2.cls.from_pretrained("nobody/flux2", **arguments)
    assert model.config._name_or_path == "nobody/flux2"
    assert fetch.options and all(it.items() >= (options | {"revision": "v1"}).items() for it in fetch.options)
    assert len(hub.options) > 2 and all(it == options for it in hub.options) and hub.revisions[0] == "v1"
    assert {name.split("/")[0] for name in hub.got} == {folder.name}
    # Files that are there already are fetched again.
    assert hub.got == first * 2


class FakeConfig:
    """diffusers' download of a config."""

    def __init__(self, hub):
        self.hub, self.options = hub, []

    def __call__(self, repository, filename, **options):
        self.options.append(options)
        return str(self.hub.repository / options["subfolder"] / filename)
