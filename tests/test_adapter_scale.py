"""By what the product of an adapter's two matrices is multiplied, wherever its files say so."""

import json
import math

import pytest
import torch
from torch import nn

from loras import draw, keys, write
from small_models import Pair
from tp_layers.loader.adapter_file import find_file, read_adapter


def scalings(path):
    return {layer: it.scaling for layer, it in read_adapter(Pair(), path).layers.items()}


def folder_with(
    tmp_path, config=None, header=None, extra=None, name="adapter_model.safetensors", prefix="base_model.model."
):
    """An adapter of ranks 4 (`up`) and 2 (`down`), with PEFT's config beside it, diffusers' in its header."""
    state = keys(draw(Pair(), (4, 2)), prefix) | (extra or {})
    metadata = None if header is None else {"lora_adapter_metadata": json.dumps(header)}
    write(tmp_path / name, state, metadata)
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **config}))
    return tmp_path


CONFIGS = {
    "alpha": ({"r": 4, "lora_alpha": 6, "rank_pattern": {"down": 2}}, 1.5, 3.0),
    "alpha_of_one_layer": (
        {"r": 4, "lora_alpha": 4, "rank_pattern": {"down": 2}, "alpha_pattern": {"down": 5}}, 1, 2.5
    ),
    "anchored_pattern": ({"r": 4, "lora_alpha": 4, "rank_pattern": {"^down": 2}, "alpha_pattern": {"^up": 1}}, 0.25, 2),
    "root_of_the_rank": (
        {"r": 4, "lora_alpha": 6, "rank_pattern": {"down": 2}, "use_rslora": True}, 3.0, 6 / math.sqrt(2)
    ),
    "pattern_of_another_end": (
        {"r": 4, "lora_alpha": 4, "rank_pattern": {"down": 2}, "alpha_pattern": {"own": 9}}, 1, 2
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "up", "down"), CONFIGS.values(), ids=CONFIGS)
def test_the_config_of_peft_says_the_scale(tmp_path, config, up, down):
    assert scalings(folder_with(tmp_path, config)) == pytest.approx({"up": up, "down": down}, rel=1e-12)


@pytest.mark.parametrize(("config", "up", "down"), CONFIGS.values(), ids=CONFIGS)
def test_the_header_of_diffusers_says_the_scale(tmp_path, config, up, down):
    header = {f"transformer.{key}": value for key, value in config.items()} | {"text_encoder.lora_alpha": 99}
    place = folder_with(tmp_path, header=header, name="pytorch_lora_weights.safetensors", prefix="transformer.")
    assert scalings(place) == pytest.approx({"up": up, "down": down}, rel=1e-12)


def test_an_alpha_of_each_layer_says_the_scale(tmp_path):
    extra = {"transformer.up.alpha": torch.tensor(6.0)}
    assert scalings(folder_with(tmp_path, extra=extra, prefix="transformer.")) == {"up": 1.5, "down": 1.0}


def test_without_an_alpha_the_scale_is_one(tmp_path):
    header = {"text_encoder.lora_alpha": 99, "text_encoder.r": 3}
    assert scalings(folder_with(tmp_path, header=header)) == {"up": 1.0, "down": 1.0}


def test_a_config_that_belongs_to_another_file_of_the_folder_is_not_read(tmp_path):
    folder_with(tmp_path, CONFIGS["alpha"][0])
    folder_with(tmp_path, name="other.safetensors")
    assert scalings(tmp_path / "other.safetensors") == {"up": 1.0, "down": 1.0}
    assert scalings(tmp_path) == {"up": 1.5, "down": 3.0}


R = {"r": 4, "rank_pattern": {"down": 2}}
REFUSED = {
    "another_rank": ({"r": 8, "lora_alpha": 8}, None, None, "'down' has rank 2, .*adapter_config.json says 8"),
    "dora": ({**R, "use_dora": True}, None, None, "use_dora=True, which is not supported"),
    "lokr": ({"peft_type": "LOKR"}, None, None, "a LOKR adapter: only LoRA"),
    "whole_modules": ({**R, "modules_to_save": ["up"]}, None, None, "modules_to_save"),
    "changed_weights": ({**R, "init_lora_weights": "pissa_niter_4"}, None, None, "init_lora_weights='pissa_niter_4'"),
    "two_that_differ": (
        {**R, "lora_alpha": 4},
        {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.rank_pattern": {"down": 2}},
        None,
        "'down' is scaled by 2.0 or 4.0, as its files contradict each other",
    ),
    "config_and_alphas": (
        {**R, "lora_alpha": 4}, None, {"up.alpha": torch.tensor(4.0)}, "both 'up.alpha' and .*adapter_config.json say"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("config", "header", "extra", "message"), REFUSED.values(), ids=REFUSED)
def test_a_config_that_means_something_else_is_refused(tmp_path, config, header, extra, message):
    with pytest.raises(ValueError, match=message):
        scalings(folder_with(tmp_path, config, header, extra))


def test_a_config_that_is_no_json_is_refused(tmp_path):
    folder_with(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        scalings(tmp_path)


def test_the_file_of_a_folder_is_found(tmp_path):
    for name in ("adapter_model.safetensors", "pytorch_lora_weights.safetensors", "mine.safetensors"):
        folder = folder_with(tmp_path / name, name=name)
        assert find_file(folder) == find_file(folder / name) == folder / name
    folder_with(folder, name="second.safetensors")
    with pytest.raises(ValueError, match=r"several adapters, mine.safetensors, second.safetensors"):
        find_file(folder)
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        find_file("someone/lora")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"has no adapter: neither pytorch_lora_weights.safetensors nor"):
        find_file(tmp_path / "empty")
    torch.save({}, tmp_path / "lora.bin")
    with pytest.raises(ValueError, match="no safetensors file"):
        find_file(tmp_path / "lora.bin")
    (tmp_path / "broken.safetensors").write_bytes(b"12345678")
    with pytest.raises(ValueError, match=r"broken.safetensors: it is not a whole safetensors file"):
        read_adapter(nn.Linear(1, 1), tmp_path / "broken.safetensors")
