"""The model before its weights: parameters on meta in their final dtypes, everything else as from_pretrained has it."""

import json

import diffusers
import pytest
import torch
from torch import nn

import tp_layers
from entries import entries_of
from families import FAMILIES
from memory import Live, Touched
from pretrained import attributes, under
from text_models import TEXT_MODELS
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.build import Places, build, final_dtype, set_dtypes

DTYPES = [None, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=["no dtype", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("name", ["Toy", *FAMILIES])
def test_only_parameters_are_on_meta(name, dtype):
    model_class = Toy if name == "Toy" else getattr(diffusers, name)
    config = {} if name == "Toy" else FAMILIES[name].config(4)
    model, wanted = build(model_class, config, dtype), under(dtype, model_class, config)
    shapes = {key: (tensor.shape, tensor.dtype, tensor.requires_grad) for key, tensor in wanted.named_parameters()}
    assert {key: (it.shape, it.dtype, it.requires_grad) for key, it in model.named_parameters()} == shapes
    assert all(parameter.is_meta for parameter in model.parameters())
    assert not model.training and not any(module.training for module in model.modules())
    assert list(model.state_dict()) == list(wanted.state_dict())
    got, wanted = attributes(model), attributes(wanted)
    assert got.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key


def test_float8_is_no_default_dtype():
    # diffusers too builds such a model in float32 and casts it afterwards.
    model = build(Toy, {}, torch.float8_e4m3fn)
    assert model.scale.dtype == model.up.weight.dtype == torch.float32


def test_tied_parameters_stay_one():
    model = build(Toy, {})
    assert model.head.weight is model.embed.weight
    assert model.same_shift is model.shift and not model.shift.requires_grad


def test_building_leaves_torch_as_it_was():
    class Broken(Toy):
        def __init__(self):
            super().__init__()
            raise RuntimeError("broken")

    register = nn.Module.register_parameter
    build(Toy, {}, torch.bfloat16)
    with pytest.raises(ValueError, match="a Broken cannot be built from its config: broken"):
        build(Broken, {}, torch.bfloat16)
    assert nn.Module.register_parameter is register
    assert torch.get_default_dtype() == torch.float32
    assert not nn.Linear(2, 3).weight.is_meta


def test_building_runs_no_initialisers_and_fills_no_memory():
    with Touched() as touched, Live() as live:
        model = build(Toy, {"width": 512, "hidden": 1024})
    largest = model.up.weight.numel() * 4
    # A table of 1024 numbers, against a weight of 512 * 1024; of the weights, one at a time has (unused) addresses.
    assert touched.nbytes <= 1024 * 8 < largest
    assert largest <= live.peak < 1.05 * largest
    with Touched() as touched:
        nn.Linear(512, 1024)
    assert touched.nbytes == largest


@pytest.mark.parametrize("text", [None, TEXT_MODELS["T5"]], ids=["diffusers", "transformers"])
def test_a_load_under_the_meta_device_is_as_any(tmp_path, text):
    if text is None:
        save_toy(tmp_path)
    else:
        text.save(tmp_path)
    model_class, plan = (Toy, PLAN) if text is None else (text.cls, text.plan)
    wanted = tp_layers.load(model_class, tmp_path, plan=plan, group=Group())
    with torch.device("meta"):
        model = tp_layers.load(model_class, tmp_path, plan=plan, group=Group(), device="cpu")
    kept = attributes(wanted)
    assert all(torch.equal(tensor, kept[name]) for name, tensor in attributes(model).items())
    assert all(torch.equal(tensor, wanted.state_dict()[name]) for name, tensor in model.state_dict().items())


def test_a_class_without_a_config_is_refused():
    with pytest.raises(
        ValueError, match=r"Linear has no from_config: .*build others yourself and call tp_layers\.apply"
    ):
        build(nn.Linear, {})


KEEPING = type("Keeping", (Toy,), {"_keep_in_fp32_modules": ["up", "scale"]})
KEEPING_ONE = type("KeepingOne", (Toy,), {"_keep_in_fp32_modules": "up"})
HALF, FLOAT, FLOAT8 = torch.bfloat16, torch.float32, torch.float8_e5m2
RULES = {
    "no dtype: as stored": (Toy, "up.weight", HALF, None, HALF),
    "no dtype: as stored, also where float32 is kept": (KEEPING, "up.weight", HALF, None, HALF),
    "cast down": (Toy, "up.weight", FLOAT, HALF, HALF),
    "cast up": (Toy, "up.weight", HALF, FLOAT, FLOAT),
    "kept in float32": (KEEPING, "up.weight", FLOAT, HALF, FLOAT),
    "kept in float32, from less": (KEEPING, "up.weight", HALF, HALF, FLOAT),
    "kept by the name of a buffer": (KEEPING, "scale", HALF, HALF, FLOAT),
    "kept by a single name": (KEEPING_ONE, "up.bias", FLOAT, HALF, FLOAT),
    "a name that contains the kept one": (KEEPING, "upper.weight", FLOAT, HALF, HALF),
    "integers": (Toy, "steps", torch.int64, HALF, torch.int64),
    "bool": (Toy, "steps", torch.bool, HALF, torch.bool),
    "float8": (Toy, "up.weight", FLOAT8, HALF, FLOAT8),
    "float8, also where float32 is kept": (KEEPING, "up.weight", FLOAT8, HALF, FLOAT8),
}


@pytest.mark.parametrize("rule", RULES)
def test_final_dtype(rule):
    model_class, name, stored, asked, wanted = RULES[rule]
    assert final_dtype(build(model_class, {}), name, stored, asked) == wanted


@pytest.mark.parametrize("asked", [None, torch.float16], ids=["as stored", "float16"])
def test_parameters_and_buffers_get_their_final_dtypes(asked):
    model = build(KEEPING, {}, asked)
    made = entries_of(model, torch.bfloat16)
    set_dtypes(model, made, asked)
    for name, tensor in model.state_dict(keep_vars=True).items():
        kept = torch.bfloat16 if asked is None else torch.float32 if name[:2] in ("up", "sc") else asked
        assert tensor.dtype == (torch.int64 if name == "steps" else kept), name
    assert all(parameter.is_meta for parameter in model.parameters())
    assert model.head.weight is model.embed.weight and model.same_shift is model.shift
    assert not model.shift.requires_grad and model.up.weight.requires_grad
    assert torch.equal(model.steps, torch.arange(3)) and model.table.dtype == (asked or torch.float32)


def test_a_tensor_goes_to_every_place_of_the_one_it_replaces():
    model = Toy()
    model.up.register_buffer("scale", model.scale)
    places = Places(model)
    for name in ("head.weight", "embed.weight", "shift", "scale"):
        value = torch.full_like(model.state_dict()[name], 3.0)
        places.put(name, value)
        assert model.state_dict()[name].data_ptr() == value.data_ptr()
    assert model.head.weight is model.embed.weight and isinstance(model.head.weight, nn.Parameter)
    assert model.shift is model.same_shift and not model.shift.requires_grad
    assert model.scale is model.up.scale and type(model.scale) is torch.Tensor


def test_a_config_from_a_file_is_that_of_the_class(tmp_path):
    Toy(width=10).save_config(tmp_path)
    model = build(Toy, json.loads((tmp_path / "config.json").read_text()))
    assert model.config.width == 10 and model.up.in_features == 10
