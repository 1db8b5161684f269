"""`save` of transformers' models: the config that their own save_pretrained writes, and the live one as it was."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tp_layers
from checkpoints import identical, state_of
from close import randomise
from text_models import GATED, T5_PLAN, TEXT_MODELS
from tp_layers.group import Group

ONE = Group()
HALF = torch.bfloat16


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_the_config_of_a_built_model_is_as_save_pretrained_writes_it(tmp_path, name, dtype):
    text = TEXT_MODELS[name]
    # Cast after it was built: what the live config says of dtypes is of before.
    theirs: Any = text.build().to(dtype)
    theirs.save_pretrained(tmp_path / "theirs")
    model: Any = tp_layers.apply(text.build().to(dtype), text.plan, group=ONE)
    before = copy.deepcopy(model.config.to_dict())
    tp_layers.save(model, tmp_path / "ours")
    assert model.config.to_dict() == before and before["architectures"] is None
    assert config_of(tmp_path / "ours") == config_of(tmp_path / "theirs")


@pytest.fixture
def full(tmp_path) -> Path:
    """The folder of a full T5, in float32."""
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**GATED))
    randomise(model).save_pretrained(tmp_path / "full")
    return tmp_path / "full"


def test_the_encoder_of_a_full_model_is_saved_as_what_it_is(full, tmp_path):
    encoder = tp_layers.load(transformers.T5EncoderModel, full, plan=T5_PLAN, group=ONE, dtype=HALF)
    tp_layers.save(encoder, tmp_path / "encoder")
    config = config_of(tmp_path / "encoder")
    assert (config["architectures"], config["dtype"]) == (["T5EncoderModel"], "bfloat16")
    with pytest.raises(ValueError, match=r"is of another model .'architectures' is"):
        tp_layers.save(encoder, full)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_another_dtype_is_no_other_model(tmp_path, key):
    text, folder = TEXT_MODELS["T5"], tmp_path / "model"
    text.save(folder)
    config = config_of(folder)
    (folder / "config.json").write_text(json.dumps({**config, key: config.pop("dtype")}))
    model = tp_layers.load(text.cls, folder, plan=text.plan, group=ONE, dtype=HALF)
    tp_layers.save(model, folder)
    assert config_of(folder)["dtype"] == "bfloat16"
    assert identical(
        state_of(folder), {name: it.to(HALF) for name, it in model.state_dict().items() if name in state_of(folder)}
    )
