"""`load`: arguments, checkpoints and plans that cannot be right are refused before a byte is read."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tp_layers
from checkpoints import CLASSES, several_files, state_of
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group

ONE = Group()


class OldToy(Toy):
    """A class whose checkpoints may hold a tensor it no longer has."""

    _keys_to_ignore_on_load_unexpected = (r"^old\.",)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model in several files."""
    return several_files(tmp_path_factory)


@pytest.fixture
def toy(tmp_path) -> Path:
    """The folder of a `Toy` in float32, to be spoilt."""
    save_toy(tmp_path)
    return tmp_path


class Read(AssertionError):
    """A tensor was read."""


@pytest.fixture
def no_reads(monkeypatch):
    def preadv(*args: object) -> int:
        raise Read

    monkeypatch.setattr(os, "preadv", preadv)


ARGUMENTS = {
    "device_map": ({"device_map": "auto"}, r"device_map='auto' cannot be combined .* shards go to that rank's device"),
    "quantization_config": ({"quantization_config": {"load_in_4bit": True}}, r"load the model unquantised"),
    "low_cpu_mem_usage": ({"low_cpu_mem_usage": False}, r"low_cpu_mem_usage=False cannot .*; drop it"),
    "use_flashpack": ({"use_flashpack": True}, r"use_flashpack=True cannot .* use the safetensors weights"),
    "use_safetensors": ({"use_safetensors": False}, r"only safetensors files can be read in slices"),
}


@pytest.mark.parametrize("argument", ARGUMENTS)
def test_an_argument_that_cannot_be_kept_is_refused(toy, no_reads, argument):
    given, message = ARGUMENTS[argument]
    with pytest.raises(ValueError, match=message):
        tp_layers.load(Toy, toy, plan=PLAN, group=ONE, **given)


@pytest.mark.parametrize("argument", ["torch_dtype", "cache_dir", "varian"])
def test_an_unknown_argument_is_refused(toy, no_reads, argument):
    with pytest.raises(TypeError, match=rf"load\(\) got an unexpected argument '{argument}'"):
        tp_layers.load(Toy, toy, plan=PLAN, group=ONE, **{argument: None})


def test_an_argument_that_asks_for_what_load_does_is_accepted(toy):
    harmless = dict(low_cpu_mem_usage=True, use_safetensors=True, use_flashpack=False)
    absent = dict.fromkeys(ARGUMENTS)
    for arguments in (harmless, absent):
        assert tp_layers.load(Toy, toy, plan=PLAN, group=ONE, **arguments).up.spec.length == 8


def change(**changes: Any):
    """Replaces tensors of a checkpoint; None removes one. `__` in a name stands for a dot."""

    def make(folder: Path) -> None:
        state = state_of(folder)
        for name, value in changes.items():
            name = name.replace("__", ".")
            if value is None:
                del state[name]
            else:
                state[name] = value(state.get(name))
        save_file(state, folder / "diffusion_pytorch_model.safetensors")

    return make


def write_config(text: str):
    return lambda folder: (folder / "config.json").write_text(text)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def cut_short(folder: Path) -> None:
    file = folder / "diffusion_pytorch_model.safetensors"
    os.truncate(file, file.stat().st_size - 1)


QUANTISED = json.dumps({"quantization_config": {"quant_method": "bitsandbytes"}})
SPOILT: dict[str, tuple[Any, type[Exception], str]] = {
    "a missing key": (
        change(down__weight=None), ValueError, r"the checkpoint lacks \['down\.weight'\], which Toy needs"),
    "a missing buffer": (change(scale=None), ValueError, r"the checkpoint lacks \['scale'\], which Toy needs"),
    "an extra key": (
        change(old__weight=lambda _: torch.ones(2)), ValueError, r"the checkpoint has \['old\.weight'\], which Toy "),
    "another shape": (
        change(up__weight=lambda it: it.T.contiguous()), ValueError,
        r"'up\.weight' is \(6, 8\) in the checkpoint, Toy has \(8, 6\)"),
    "integer weights": (
        change(up__weight=lambda it: it.to(torch.int8)), ValueError,
        r"'up\.weight' is torch\.int8 in the checkpoint, torch\.float32 in Toy \(quantised\?\)"),
    "a floating-point counter": (
        change(steps=lambda it: it.float()), ValueError, r"'steps' is torch\.float32 in the checkpoint, torch\.int64"),
    "a file cut short": (cut_short, ValueError, r"diffusion_pytorch_model\.safetensors is not a whole safetensors"),
    "no config": (no_config, FileNotFoundError, r"has no config\.json: is the model in a subfolder of it\?"),
    "a config that is not JSON": (write_config("{"), ValueError, r"config\.json is not JSON"),
    "a config that is a list": (write_config("[]"), ValueError, r"config\.json is not the config of a model"),
    "a quantised checkpoint": (
        write_config(QUANTISED), ValueError, r"config\.json has a quantization_config: .* load the model unquantised"),
}  # fmt: skip


@pytest.mark.parametrize("case", SPOILT)
def test_a_checkpoint_that_does_not_fit_is_refused(toy, no_reads, case):
    spoil, error, message = SPOILT[case]
    spoil(toy)
    with pytest.raises(error, match=message):
        tp_layers.load(Toy, toy, plan=PLAN, group=ONE)


PLANS: dict[str, tuple[str, Any, int, str]] = {
    "a key that matches nothing": ("Toy", {"upp": "colwise"}, 1, r"'upp' matches nothing in Toy; the nearest .* 'up'"),
    "a block that does not divide": ("Toy", PLAN, 3, r"'up\.weight' .* of 8 is not divisible by 3 ranks; .* 1, 2, 4, "),
    "heads that do not divide": (
        "QwenImageTransformer2DModel", None, 8, r"heads of 4 is not divisible by 8 ranks; .* 1, 2, 4$"),
    "a tied parameter": (
        "Toy", {**PLAN, "head": "colwise_gather"}, 1, r"'head\.weight' is tied to \['embed\.weight'\]; untie it"),
    "no plan for the class": ("Toy", None, 1, r"no plan for Toy: pass plan="),
}  # fmt: skip


@pytest.mark.parametrize("case", PLANS)
def test_a_plan_that_does_not_fit_is_refused(checkpoint, no_reads, case):
    name, plan, size, message = PLANS[case]
    with pytest.raises(ValueError, match=message):
        tp_layers.load(CLASSES[name], checkpoint(name), plan=plan, group=Group(0, size))


def test_the_spy_sees_a_read(toy, no_reads):
    with pytest.raises(Read):
        tp_layers.load(Toy, toy, plan=PLAN, group=ONE)


def test_a_path_that_is_no_folder_is_refused(toy, no_reads):
    file = toy / "diffusion_pytorch_model.safetensors"
    for path in (file, str(file), toy / "none", "./none/none", "~/none", "a/b/c", "name"):
        with pytest.raises(FileNotFoundError, match="is neither a folder nor the id of a repository"):
            tp_layers.load(Toy, path, plan=PLAN, group=ONE)
    with pytest.raises(FileNotFoundError, match=rf"there is no folder {toy}/transformer"):
        tp_layers.load(Toy, toy, plan=PLAN, group=ONE, subfolder="transformer")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json: is the model in a subfolder of it\?"):
        tp_layers.load(Toy, toy.parent, plan=PLAN, group=ONE)


def test_a_class_that_is_not_diffusers_is_refused(toy, no_reads):
    with pytest.raises(ValueError, match="Linear has no from_config"):
        tp_layers.load(nn.Linear, toy, plan=PLAN, group=ONE)


def test_a_key_the_class_ignores_is_not_read(toy):
    _, before = tp_layers.load(Toy, toy, plan=PLAN, group=ONE, report=True)
    change(old__weight=lambda _: torch.ones(1000))(toy)
    model, report = tp_layers.load(OldToy, toy, plan=PLAN, group=ONE, report=True)
    assert report.bytes_read == before.bytes_read and "old.weight" not in model.state_dict()
