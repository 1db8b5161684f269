"""`reload` of transformers' models: published names, ties and dtypes, bit for bit as `load` has them."""

from pathlib import Path

import pytest
import torch

import tp_layers
from as_pretrained import same
from text_models import TEXT_MODELS
from tp_layers.group import Group

ONE = Group()


@pytest.mark.parametrize("name", TEXT_MODELS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as stored", "bfloat16"])
def test_a_reloaded_model_is_a_loaded_one(tmp_path: Path, name, dtype):
    text = TEXT_MODELS[name]
    text.save(tmp_path, torch.float32, max_shard_size="4KB")
    model = tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    assert tp_layers.reload(model, tmp_path) is model and model.name_or_path == str(tmp_path)
    same(model, tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE, dtype=dtype))
