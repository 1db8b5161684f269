"""`save`: what was loaded or sharded in memory comes back bit for bit, or is refused on every rank."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tp_layers
from checkpoints import CLASSES, identical, names, one_file, resave, state_of
from close import randomise
from families import FAMILIES
from toy import PLAN, Toy
from tp_layers.group import Group
from tp_layers.loader.index import read_header, read_index

HALF = torch.bfloat16
STEM = "diffusion_pytorch_model"
SIZES = {"one rank": 1, "two ranks": 2, "four ranks": 4}
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
SPLIT = "60KB"


class Plain(nn.Module):
    """Not a diffusers model: two Linears to shard, two tied ones, and tensors of odd kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.embed, self.head = nn.Linear(6, 5, bias=False), nn.Linear(6, 5)
        self.head.weight = self.embed.weight
        self.low = nn.Parameter(torch.ones(3, dtype=HALF))
        self.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).T)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.register_buffer("table", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., 6]` -> `[.., 5]`."""
        return self.head(self.down(torch.relu(self.up(x))))


class Configured:
    """A config as transformers' are: it writes itself."""

    def save_pretrained(self, folder: Path) -> None:
        """Writes `config.json`."""
        (Path(folder) / "config.json").write_text('{"model_type": "toy"}')


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model in one file."""
    return one_file(tmp_path_factory)


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["Toy", *FAMILIES])
@sizes
def test_a_checkpoint_survives_loading_and_saving(ranks, checkpoint, tmp_path, name, dtype, size):
    source, whole, split = checkpoint(name, dtype), tmp_path / "new" / "whole", tmp_path / "split"
    wanted = state_of(source)
    ranks(size, resave, name, source, {whole: "5GB", split: SPLIT}, PLAN if name == "Toy" else None)
    assert identical(state_of(whole), wanted) and identical(state_of(split), wanted)
    assert names(whole) == ["config.json", f"{STEM}.safetensors"]
    config = json.loads((source / "config.json").read_text())
    for folder in (whole, split):
        assert json.loads((folder / "config.json").read_text()) == {**config, "_name_or_path": str(source)}
    if name != "Toy":
        files = [file for file in names(split) if file.endswith(".safetensors")]
        assert len(files) > 1 and {entry.file.name for entry in read_index(split).values()} == set(files)


@pytest.mark.parametrize("name", [name for name in FAMILIES if CLASSES[name]._keep_in_fp32_modules is None])
def test_diffusers_loads_what_was_saved_and_would_have_saved_the_same(ranks, checkpoint, tmp_path, name):
    source, theirs = checkpoint(name), tmp_path / "theirs"
    model_class = CLASSES[name]
    model_class.from_pretrained(source, low_cpu_mem_usage=False).save_pretrained(theirs)
    folders = {tmp_path / "whole": "5GB", tmp_path / "split": SPLIT}
    ranks(2, resave, name, source, folders, None)
    for folder in folders:
        assert (folder / "config.json").read_text() == (theirs / "config.json").read_text()
        model, info = model_class.from_pretrained(folder, low_cpu_mem_usage=False, output_loading_info=True)
        assert not any(info.values()), info
        assert identical(model.state_dict(), state_of(theirs))
    for file in (theirs, tmp_path / "whole"):
        assert names(file) == ["config.json", f"{STEM}.safetensors"]


def apply_and_save(group: Group, model_class: type[nn.Module], folder: Path, attributes: dict[str, Any]) -> list[str]:
    """Shards a model in memory and saves it."""
    torch.manual_seed(0)
    model = randomise(model_class())
    for name, value in attributes.items():
        setattr(model, name, value)
    tp_layers.save(tp_layers.apply(model, PLAN, group=group), folder)
    return list(model.state_dict())


def test_every_tensor_starts_at_a_multiple_of_its_element_size(ranks, tmp_path):
    ranks(2, apply_and_save, Plain, tmp_path, {})
    entries = read_header(tmp_path / "model.safetensors").values()
    assert {entry.dtype.itemsize for entry in entries} == {1, 2, 4, 8}
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in entries)


@sizes
def test_a_model_without_a_config_is_saved_as_model(ranks, tmp_path, size):
    keys = ranks(size, apply_and_save, Plain, tmp_path, {})[0]
    assert names(tmp_path) == ["model.safetensors"]
    wanted = randomise(Plain()).state_dict()
    assert list(wanted) == keys
    # Tied parameters are one entry, under the first of their names.
    assert torch.equal(wanted["embed.weight"], wanted.pop("head.weight"))
    assert identical(load_file(tmp_path / "model.safetensors"), wanted)


def save_turned(group: Group, folder: Path) -> bool:
    """Saves a model whose shards do not lie in memory row by row."""
    model = tp_layers.apply(randomise(Plain()), PLAN, group=group)
    for layer in (model.up, model.down):
        layer.weight.data = layer.weight.data.T.contiguous().T
    tp_layers.save(model, folder)
    return model.up.weight.is_contiguous()


def test_shards_may_lie_in_memory_in_any_order(ranks, tmp_path):
    assert ranks(2, save_turned, tmp_path) == [False, False]
    wanted = randomise(Plain()).state_dict()
    del wanted["head.weight"]
    assert identical(load_file(tmp_path / "model.safetensors"), wanted)


def test_a_config_that_writes_itself_does(ranks, tmp_path):
    ranks(2, apply_and_save, Plain, tmp_path, {"config": Configured()})
    assert names(tmp_path) == ["config.json", "model.safetensors"]
    assert json.loads((tmp_path / "config.json").read_text()) == {"model_type": "toy"}


def test_tied_parameters_are_tied_again(ranks, checkpoint, tmp_path):
    ranks(2, resave, "Toy", checkpoint("Toy"), {tmp_path: "5GB"}, PLAN)
    entries = read_index(tmp_path)
    assert not {"head.weight", "same_shift"} & set(entries) and {"embed.weight", "shift"} <= set(entries)
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=Group())
    assert model.head.weight is model.embed.weight and model.same_shift is model.shift


def test_a_model_that_is_not_sharded_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"this Toy is not sharded by tp_layers: use its own save_pretrained"):
        tp_layers.save(Toy(), tmp_path / "new")
    assert names(tmp_path) == []


def refused(group: Group, folder: Path, dtype: torch.dtype | None, limit: int | str) -> str:
    model = Plain()
    if dtype is not None:
        model.register_buffer("odd", torch.zeros(2, dtype=dtype))
    try:
        tp_layers.save(tp_layers.apply(randomise(model), PLAN, group=group), folder, max_shard_size=limit)
    except ValueError as error:
        return str(error)
    return "saved"


def test_what_cannot_be_written_is_refused_on_every_rank(ranks, tmp_path):
    folder = tmp_path / "new"
    messages = ranks(2, refused, folder, torch.complex128, "5GB")
    assert messages == ["'odd' is torch.complex128, which safetensors files cannot hold"] * 2
    messages = ranks(2, refused, folder, None, "lots")
    assert messages == ["max_shard_size must be a number of bytes, or such as '5GB', got 'lots'"] * 2
    assert not folder.exists()
