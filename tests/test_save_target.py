"""`save`: a folder that has another model in it is refused on every rank, and is as it was."""

import json
from pathlib import Path
from typing import Any

import pytest
from diffusers.configuration_utils import register_to_config
from torch import nn

import tp_layers
from checkpoints import identical, names, state_of
from close import randomise
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group

STEM = "diffusion_pytorch_model"


class Grown(Toy):
    """A `Toy` of a later version, whose new argument changes nothing at its default."""

    @register_to_config
    def __init__(self, width: int = 6, hidden: int = 8, ticks: tuple[int, ...] = (1, 2), slope: float = 1.0):
        super().__init__(width, hidden)


class Plain(nn.Module):
    """A model without a config."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)


def save_refused(group: Group, model_class: type[Toy], folder: Path) -> str:
    """What `save` says; nothing where it saves."""
    model = tp_layers.apply(randomise(model_class(), 1), PLAN, group=group)
    try:
        tp_layers.save(model, folder)
    except ValueError as error:
        return str(error)
    return ""


def change(folder: Path, **changes: Any) -> None:
    """Changes the config in `folder`; None removes a key."""
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


OTHERS = {
    "another width": ({"width": 12}, "('width' is 12 there, 6 here)"),
    "another class": ({"_class_name": "Other"}, "('_class_name' is 'Other' there, 'Toy' here)"),
    "an argument that the class lacks": ({"depth": 2}, "('depth' is 2 there, 'nothing' here)"),
    "no class": ({"_class_name": None}, "('_class_name' is 'nothing' there, 'Toy' here)"),
}
SAME = {
    "notes": {"_name_or_path": "elsewhere", "_diffusers_version": "0.1", "_note": [1]},
    "a default left out": {"hidden": None},
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_model_is_refused(ranks, tmp_path, case):
    state = save_toy(tmp_path)
    change(tmp_path, **OTHERS[case][0])
    config = (tmp_path / "config.json").read_text()
    for message in ranks(2, save_refused, Toy, tmp_path):
        assert f"{tmp_path}/config.json is of another model {OTHERS[case][1]}: save to a folder of its own" in message
    assert (tmp_path / "config.json").read_text() == config
    assert names(tmp_path) == ["config.json", f"{STEM}.safetensors"] and identical(state_of(tmp_path), state)


@pytest.mark.parametrize("case", SAME)
def test_the_same_model_is_replaced(ranks, tmp_path, case):
    state = save_toy(tmp_path)
    change(tmp_path, **SAME[case])
    assert ranks(2, save_refused, Toy, tmp_path) == ["", ""]
    assert json.loads((tmp_path / "config.json").read_text()).items() >= {"hidden": 8, "_class_name": "Toy"}.items()
    assert not identical(state_of(tmp_path), state)


def test_a_config_older_than_an_argument_means_its_default(ranks, tmp_path):
    save_toy(tmp_path)
    change(tmp_path, _class_name="Grown")
    assert ranks(2, save_refused, Grown, tmp_path) == ["", ""]
    assert json.loads((tmp_path / "config.json").read_text())["ticks"] == [1, 2]
    change(tmp_path, slope=2.0)
    assert all("('slope' is 2.0 there, 1.0 here)" in message for message in ranks(2, save_refused, Grown, tmp_path))


def a_folder(file: Path) -> None:
    file.mkdir()


NO_CONFIG = {
    "a folder": (a_folder, "is not a file"),
    "no JSON": (lambda file: file.write_text('{"width": 6'), "is not JSON"),
    "no text": (lambda file: file.write_bytes(b"\xff\xfe{}"), "is not JSON"),
    "nested too deeply": (lambda file: file.write_text("[" * 100000), "is not JSON"),
    "a list": (lambda file: file.write_text("[]"), "is not the config of a model: it holds a list"),
}


@pytest.mark.parametrize("case", NO_CONFIG)
def test_what_is_no_config_is_refused(ranks, tmp_path, case):
    make, reason = NO_CONFIG[case]
    make(tmp_path / "config.json")
    for message in ranks(2, save_refused, Toy, tmp_path):
        assert f"{tmp_path}/config.json {reason}" in message and "save to a folder of its own" in message
    assert names(tmp_path) == ["config.json"]


@pytest.mark.parametrize("name", [f"{STEM}.safetensors", f"{STEM}.safetensors.index.json"], ids=["a file", "an index"])
def test_weights_that_would_be_read_instead_are_refused(ranks, tmp_path, name):
    (tmp_path / name).write_text("")
    for message in ranks(2, save_plain, tmp_path, False):
        assert f"{tmp_path} has {name}, which is read instead of model.safetensors" in message
    assert names(tmp_path) == [name]


@pytest.mark.parametrize("sharded", [False, True], ids=["ordinary", "sharded"])
def test_a_model_without_a_config_is_not_put_under_one(ranks, tmp_path, sharded):
    (tmp_path / "config.json").write_text("{}")
    for message in ranks(2, save_plain, tmp_path, sharded):
        assert f"{tmp_path}/config.json is of another model, as this Plain has no config: save to a folder" in message
    assert names(tmp_path) == ["config.json"]


def save_plain(group: Group, folder: Path, sharded: bool) -> str:
    """What saving a model without a config says."""
    with pytest.raises(ValueError) as raised:
        tp_layers.save(tp_layers.apply(randomise(Plain()), PLAN, group=group), folder, sharded=sharded)
    return str(raised.value)
