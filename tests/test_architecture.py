"""Whether two configs are of one architecture: what an older or another writer leaves out, and what is a difference."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3Model, T5Config, T5EncoderModel

import tp_layers
from close import randomise
from toy import Toy
from tp_layers.group import Group
from tp_layers.loader.architecture import difference

T5 = T5Config(d_model=16, d_kv=4, num_heads=4, num_layers=2, d_ff=32, vocab_size=20)
QWEN3 = Qwen3Config(
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=24,
    vocab_size=20,
)
PLAN = {"encoder.block.*.layer.1.DenseReluDense.wi": "colwise", "encoder.block.*.layer.1.DenseReluDense.wo": "rowwise"}

# What published configs have, and the installed library would not write.
OLD = {
    "a T5 without newer keys": (T5EncoderModel, T5, ["is_decoder", "scale_decoder_outputs"], {}),
    "what is run and generated": (
        T5EncoderModel,
        T5,
        [],
        {"use_cache": False, "output_past": True, "temperature": 0.5},
    ),
    "what the class knows nothing of": (T5EncoderModel, T5, [], {"task_specific_params": {"summarization": {}}}),
    "other tokens": (T5EncoderModel, T5, [], {"pad_token_id": 3}),
    "another dtype": (T5EncoderModel, T5, ["dtype"], {"torch_dtype": "float16"}),
    "an old rotary base": (Qwen3Model, QWEN3, ["rope_parameters"], {"rope_theta": 10000.0}),
}


def config_of(config: Any, without: list[str], more: dict[str, Any]) -> dict[str, Any]:
    written = json.loads(config.to_json_string(use_diff=False))
    return {key: value for key, value in written.items() if key not in without} | more


@pytest.mark.parametrize("case", OLD)
def test_what_another_version_leaves_out_is_no_difference(case):
    model_class, config, without, more = OLD[case]
    model = model_class(config)
    here = json.loads(model.config.to_json_string(use_diff=False))
    assert difference(model, config_of(config, without, more), here, ("dtype", "torch_dtype")) == ""


@pytest.mark.parametrize(
    ("model_class", "config", "more"),
    [
        (T5EncoderModel, T5, {"num_heads": 2}),
        (T5EncoderModel, T5, {"layer_norm_epsilon": 1e-5}),
        (T5EncoderModel, T5, {"relative_attention_num_buckets": 16}),
        (Qwen3Model, QWEN3, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (Qwen3Model, QWEN3, {"rms_norm_eps": 1e-5}),
    ],
)
def test_what_changes_the_numbers_is_a_difference(model_class, config, more):
    model = model_class(config)
    here = json.loads(model.config.to_json_string(use_diff=False))
    assert next(iter(more)) in difference(model, config_of(config, [], more), here)


def test_a_diffusers_config_may_lack_what_has_a_default():
    model = Toy()
    here = dict(model.config)
    assert difference(model, {"_class_name": "Toy", "width": 6}, here | {"_class_name": "Toy"}) == ""
    assert (
        difference(model, {"_class_name": "Toy", "width": 7}, here | {"_class_name": "Toy"})
        == "'width' is 7 there, 6 here"
    )


def test_a_published_text_encoder_is_reloaded_from_where_it_was_loaded(tmp_path: Path):
    randomise(T5EncoderModel(T5)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    old = {key: value for key, value in config.items() if key not in ("is_decoder", "dtype")}
    (tmp_path / "config.json").write_text(json.dumps(old | {"output_past": True, "n_positions": 512}))
    model = tp_layers.load(T5EncoderModel, tmp_path, plan=PLAN, group=Group(), dtype=torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.fill_(1)
    model.config.use_cache = False
    tp_layers.reload(model, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
