"""`load` of transformers' models: every tensor, tie and config is that of its from_pretrained, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open

import tp_layers
from checkpoints import identical, state_of
from pretrained import attributes
from text_models import TEXT_MODELS
from tp_layers.group import Group
from tp_layers.plans.shard import sharding_of

ONE = Group()
HALF = torch.bfloat16
names = pytest.mark.parametrize("name", TEXT_MODELS)
stored = pytest.mark.parametrize("stored", [torch.float32, HALF], ids=["float32", "bfloat16"])
LIMITS = {"one file": "1GB", "several files": "4KB"}
files = pytest.mark.parametrize("files", LIMITS)


@pytest.fixture(autouse=True)
def silence():
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model, made once."""
    made: dict[Any, Path] = {}

    def folder(name: str, stored: torch.dtype = torch.float32, files: str = "several files") -> Path:
        if (name, stored, files) not in made:
            made[name, stored, files] = tmp_path_factory.mktemp("text")
            TEXT_MODELS[name].save(made[name, stored, files], stored, max_shard_size=LIMITS[files])
        return made[name, stored, files]

    return folder


def tensors(model: Any) -> dict[str, torch.Tensor]:
    return {**model.state_dict(), **attributes(model)}


def ties(model: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def same(model: Any, wanted: Any) -> None:
    """Everything but the sharding is as in `wanted`."""
    assert identical(tensors(model), tensors(wanted))
    assert ties(model) == ties(wanted)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not any(module.training for module in model.modules())
    assert model.config.to_dict() == wanted.config.to_dict() and model.name_or_path == wanted.name_or_path
    assert model.config._attn_implementation == wanted.config._attn_implementation
    if model.can_generate():
        assert model.generation_config.to_dict() == wanted.generation_config.to_dict()


@names
@stored
@files
def test_everything_is_as_from_pretrained_has_it(checkpoint, name, stored, files):
    text, folder = TEXT_MODELS[name], checkpoint(name, stored, files)
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (files == "several files")
    for dtype in (None, torch.float32, HALF, torch.float16):
        model = tp_layers.load(text.cls, folder, plan=text.plan, group=ONE, dtype=dtype)
        same(model, text.cls.from_pretrained(folder, dtype=dtype or "auto"))
        assert len(sharding_of(model).resolved.styles) >= 2 * len(text.plan)


def loaded(group: Group, name: str, folder: Path, dtype: torch.dtype | None) -> tuple[Any, dict[str, torch.Tensor]]:
    text = TEXT_MODELS[name]
    model = tp_layers.load(text.cls, folder, plan=text.plan, group=group, dtype=dtype)
    return sharding_of(model).resolved.specs, tensors(model)


@names
@pytest.mark.parametrize("dtype", [None, HALF], ids=["as stored", "bfloat16"])
def test_each_of_two_ranks_has_its_shards(ranks, checkpoint, name, dtype):
    folder = checkpoint(name)
    wanted = tensors(TEXT_MODELS[name].cls.from_pretrained(folder, dtype=dtype or "auto"))
    for rank, (specs, got) in enumerate(ranks(2, loaded, name, folder, dtype)):
        assert len(specs) >= 4
        shards = {key: specs[key].take(full, rank, 2) if key in specs else full for key, full in wanted.items()}
        assert identical(got, shards)


def test_published_names_are_those_the_models_no_longer_have(checkpoint):
    renamed = [name for name, text in TEXT_MODELS.items() if text.published]
    assert renamed == ["Qwen2.5-VL", "Mistral3"]
    for name in renamed:
        published = set(TEXT_MODELS[name].published)
        assert published <= set(state_of(checkpoint(name)))
        assert not published & set(TEXT_MODELS[name].build().state_dict())


def test_what_float16_keeps_in_float32(checkpoint):
    text = TEXT_MODELS["T5"]
    for dtype, kept in ((torch.float16, torch.float32), (HALF, HALF)):
        model = tp_layers.load(text.cls, checkpoint("T5"), plan=text.plan, group=ONE, dtype=dtype)
        layer = model.encoder.block[0].layer[1].DenseReluDense
        assert layer.wo.weight.dtype == kept and layer.wi_0.weight.dtype == dtype


def test_a_component_of_a_pipeline(tmp_path):
    text = TEXT_MODELS["T5"]
    text.save(tmp_path / "text_encoder_2")
    model = tp_layers.load(text.cls, tmp_path, subfolder="text_encoder_2", plan=text.plan, group=ONE)
    wanted = text.cls.from_pretrained(tmp_path, subfolder="text_encoder_2")
    assert identical(tensors(model), tensors(wanted)) and ties(model) == ties(wanted)


def test_the_generation_config_is_that_of_the_folder(tmp_path):
    text = TEXT_MODELS["Qwen3"]
    text.save(tmp_path)
    for config in (tmp_path / "generation_config.json", None):
        if config:
            config.write_text('{"max_new_tokens": 77, "eos_token_id": [5, 6]}')
        else:
            (tmp_path / "generation_config.json").unlink()
        model = tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE)
        assert model.generation_config.to_dict() == text.cls.from_pretrained(tmp_path).generation_config.to_dict()
        assert (model.generation_config.max_new_tokens == 77) == bool(config)


def test_transformers_prefers_a_single_file_to_an_index(tmp_path):
    text = TEXT_MODELS["Llama"]
    text.save(tmp_path, max_shard_size="4KB")
    model = text.build()
    model.norm.weight.data.fill_(7)
    model.save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    same(tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE), text.cls.from_pretrained(tmp_path))


def test_the_sharded_model_computes_what_the_whole_does(checkpoint):
    text = TEXT_MODELS["T5"]
    model = tp_layers.load(text.cls, checkpoint("T5"), plan=text.plan, group=ONE, backend="torch")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    with torch.no_grad():
        wanted = text.cls.from_pretrained(checkpoint("T5"))(tokens).last_hidden_state
        assert torch.equal(model(tokens).last_hidden_state, wanted)


def test_the_files_hold_what_the_test_thinks(checkpoint):
    for name in ("T5", "Qwen3, tied"):
        for file in checkpoint(name).glob("*.safetensors"):
            with safe_open(file, "pt") as opened:
                assert not {"encoder.embed_tokens.weight", "lm_head.weight"} & set(opened.keys())
