"""`load(..., mmap=True)`: what lies in one run of a file stays there, the rest is read, and the values are the same."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tp_layers
from checkpoints import identical, state_of
from families import FAMILIES, run
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group

ONE = Group()
FILE = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def toy(tmp_path) -> Path:
    """The folder of a `Toy`."""
    save_toy(tmp_path)
    return tmp_path


def mapped(model: torch.nn.Module, folder: Path) -> set[str]:
    """The tensors of the model that lie in a mapping of its file."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(folder / FILE) in line]
    spans = [tuple(int(address, 16) for address in line[0].split("-")) for line in lines]
    state = model.state_dict()
    return {name for name, it in state.items() if any(first <= it.data_ptr() < last for first, last in spans)}


@pytest.mark.parametrize("rank", [0, 1])
def test_runs_are_mapped_and_columns_are_read(toy, rank):
    group = Group(rank, 2)
    model, report = tp_layers.load(Toy, toy, plan=PLAN, group=group, mmap=True, report=True)
    plain, reading = tp_layers.load(Toy, toy, plan=PLAN, group=group, report=True)
    assert identical(model.state_dict(), plain.state_dict())
    assert mapped(model, toy) == set(model.state_dict()) - {"down.weight"} and mapped(plain, toy) == set()
    assert report.bytes_needed == model.down.weight.nbytes and report.bytes_held == reading.bytes_held
    assert model.embed.weight is model.head.weight and model.shift is model.same_shift


def both(group: Group, name: str, folder: Path) -> list[bool]:
    """Whether the output is the same, mapped and read."""
    outputs = []
    for mmap in (False, True):
        model = tp_layers.load(getattr(__import__("diffusers"), name), folder, group=group, mmap=mmap)
        outputs.append(run(model, FAMILIES[name].inputs()))
    return [torch.equal(a, b) for a, b in zip(*outputs, strict=True)]


@pytest.mark.parametrize("size", [1, 2], ids=["one rank", "two ranks"])
def test_the_output_is_the_same(ranks, tmp_path, size):
    FAMILIES["Flux2Transformer2DModel"].build().save_pretrained(tmp_path)
    assert all(all(result) for result in ranks(size, both, "Flux2Transformer2DModel", tmp_path))


def test_a_cast_tensor_is_read(toy):
    model = tp_layers.load(Toy, toy, plan=PLAN, group=ONE, mmap=True, dtype=torch.bfloat16)
    assert mapped(model, toy) == {"steps"}
    assert torch.equal(model.up.weight, state_of(toy)["up.weight"].bfloat16())


def test_what_is_written_into_the_model_does_not_reach_the_file(toy):
    before = (toy / FILE).read_bytes()
    model = tp_layers.load(Toy, toy, plan=PLAN, group=ONE, mmap=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    assert (toy / FILE).read_bytes() == before and bool((model.up.weight == 7).all())


def test_data_at_an_odd_offset_is_read(toy):
    data = (toy / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    (toy / FILE).write_bytes((length + 1).to_bytes(8, "little") + data[8 : 8 + length] + b" " + data[8 + length :])
    model = tp_layers.load(Toy, toy, plan=PLAN, group=ONE, mmap=True)
    assert mapped(model, toy) == set()
    save_file({"x": torch.ones(1)}, toy / "other.safetensors")
    assert torch.equal(model.up.weight, tp_layers.load(Toy, toy, plan=PLAN, group=ONE).up.weight)


def test_a_reload_fills_the_mapping_as_any_memory(toy, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    save_toy(other)
    wanted = {name: tensor.flip(0) for name, tensor in state_of(toy).items()}
    save_file(wanted, other / FILE)
    before = (toy / FILE).read_bytes()
    model = tp_layers.load(Toy, toy, plan=PLAN, group=ONE, mmap=True)
    tp_layers.reload(model, other)
    assert torch.equal(model.up.weight, wanted["up.weight"]) and (toy / FILE).read_bytes() == before


def test_a_file_that_was_replaced_is_refused(toy):
    def swap(model: Toy) -> dict[str, str]:
        os.replace(toy / "copy", toy / FILE)
        return PLAN

    (toy / "copy").write_bytes((toy / FILE).read_bytes())
    tp_layers.register("Toy", swap)
    try:
        with pytest.raises(OSError, match=rf"{FILE} is not the file whose header was read"):
            tp_layers.load(Toy, toy, group=ONE, mmap=True)
    finally:
        tp_layers.plans.registry._PLANS.pop("Toy")


def test_only_cpu_ranks_map(toy):
    with pytest.raises(ValueError, match="mmap=True maps weights into CPU memory, not onto meta: drop it"):
        tp_layers.load(Toy, toy, plan=PLAN, group=ONE, mmap=True, device="meta")
