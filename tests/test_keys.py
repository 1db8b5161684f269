"""The tensors of a checkpoint that are the model's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import tp_layers
from checkpoints import state_of
from entries import entries_of
from refused import refused
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.build import build
from tp_layers.loader.index import Entry
from tp_layers.loader.keys import check_keys


def test_keys_come_in_the_order_of_the_files():
    model = build(Toy, {})
    made = entries_of(model)
    order = list(made)
    made = {name: made[name] for name in reversed(order)}
    assert list(check_keys(model, made)) == order
    elsewhere = made[order[0]]
    made[order[0]] = Entry(Path("y"), elsewhere.dtype, elsewhere.shape, 0)
    assert list(check_keys(model, made)) == [*order[1:], order[0]]


@pytest.mark.parametrize("kept", ["embed.weight", "head.weight"])
def test_one_entry_of_tied_parameters_is_enough(kept):
    model = build(Toy, {})
    made = entries_of(model)
    made[kept] = made.pop("embed.weight")
    assert set(check_keys(model, made)) == set(made)
    del made[kept]
    with pytest.raises(ValueError, match=r"the checkpoint lacks \['embed\.weight'\], which Toy needs"):
        check_keys(model, made)


FILE = "diffusion_pytorch_model.safetensors"


class Optional(Toy):
    """A `Toy` of which a checkpoint may lack buffers."""

    _keys_to_ignore_on_load_missing = ("steps", "scale")


def replace(folder: Path, **changes: torch.Tensor | None) -> None:
    """Changes tensors of a checkpoint; None takes one away."""
    state: dict[str, Any] = {**state_of(folder), **{name.replace("__", "."): it for name, it in changes.items()}}
    save_file({name: tensor for name, tensor in state.items() if tensor is not None}, folder / FILE)


@pytest.mark.parametrize("name", ["steps", "scale"])
def test_reload_keeps_no_buffer_of_the_checkpoint_before(tmp_path, name):
    save_toy(tmp_path)
    Optional().save_config(tmp_path)
    model = tp_layers.load(Optional, tmp_path, plan=PLAN, group=Group())
    replace(tmp_path, **{name: None})
    with refused(model, f"the checkpoint lacks ['{name}'], which Optional needs; load it anew"):
        tp_layers.reload(model, tmp_path)
    fresh = tp_layers.load(Optional, tmp_path, plan=PLAN, group=Group())
    assert torch.equal(getattr(fresh, name), getattr(Toy(), name))
    replace(tmp_path, down__bias=None)
    with pytest.raises(ValueError, match=r"\['\w+', 'down\.bias'\], which Optional needs$"):
        tp_layers.reload(model, tmp_path)


class Packed(Toy):
    """A `Toy` with tensors of one byte an element."""

    def __init__(self, **config: Any) -> None:
        super().__init__(**config)
        self.register_buffer("small", torch.arange(3, dtype=torch.int8))
        self.register_buffer("mask", torch.tensor([True, False]))
        self.register_buffer("packed", torch.ones(3, dtype=torch.float8_e4m3fn))


CASTS = {
    "integers to fewer bits": ("small", torch.int64),
    "integers to more bits": ("steps", torch.int32),
    "integers to bool": ("mask", torch.int64),
    "float8 to float32": ("scale", torch.float8_e5m2),
    "float32 to float8": ("packed", torch.float32),
    "float8 to another": ("packed", torch.float8_e5m2),
}


@pytest.fixture
def packed(tmp_path) -> Path:
    """The folder of a `Packed`."""
    model = Packed()
    model.save_config(tmp_path)
    state = {name: it for name, it in model.state_dict().items() if name not in ("head.weight", "same_shift")}
    save_file(state, tmp_path / FILE)
    return tmp_path


@pytest.mark.parametrize("cast", CASTS)
def test_reload_casts_between_wide_floating_point_dtypes_alone(packed, cast):
    name, dtype = CASTS[cast]
    model = tp_layers.load(Packed, packed, plan=PLAN, group=Group())
    own = model.state_dict()[name]
    replace(packed, **{name: torch.full(own.shape, 300.0).to(dtype)})
    with refused(model, f"'{name}' is {dtype} in the checkpoint, {own.dtype} in Packed, and is not cast"):
        tp_layers.reload(model, packed)
    assert tp_layers.load(Packed, packed, plan=PLAN, group=Group()).state_dict()[name].dtype == dtype


def test_reload_reads_every_dtype_that_is_the_models_own_and_casts_wide_ones(packed):
    model = tp_layers.load(Packed, packed, plan=PLAN, group=Group())
    old = state_of(packed)
    new = {name: (it.float() - 1).to(it.dtype) for name, it in old.items()}
    wide = {torch.float32: torch.bfloat16, torch.float64: torch.float16}
    new = {name: it.to(wide.get(it.dtype, it.dtype)) for name, it in new.items()}
    save_file(new, packed / FILE)
    tp_layers.reload(model, packed)
    state = model.state_dict()
    for name, tensor in new.items():
        assert state[name].dtype == old[name].dtype, name
        assert torch.equal(state[name], tensor.to(old[name].dtype)), name
