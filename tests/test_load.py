"""`load`: each rank reads and holds its shards and no more; what cannot be right is refused before a byte is read."""

import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import diffusers
import huggingface_hub
import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from torch import nn

import tp_layers
from close import randomise
from families import FAMILIES
from test_build import PLAN, Touched, Toy, attributes, under
from tp_layers.describe import Report, Tensor, describe
from tp_layers.group import Group
from tp_layers.loader import read
from tp_layers.loader.load import LoadReport, find_folder
from tp_layers.plans.shard import sharding_of

ONE = Group()
HALF = torch.bfloat16
SIZES = {"one rank": 1, "two ranks": 2, "four ranks": 4}
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
names = pytest.mark.parametrize("name", FAMILIES)


class OldToy(Toy):
    """A class whose checkpoints may hold a tensor it no longer has."""

    _keys_to_ignore_on_load_unexpected = (r"^old\.",)


CLASSES: dict[str, Any] = {"Toy": Toy, **{name: getattr(diffusers, name) for name in FAMILIES}}


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def save_toy(folder: Path, dtype: torch.dtype | None = None, **config: int) -> dict[str, torch.Tensor]:
    """A checkpoint of a `Toy`: tied parameters have one entry, floating-point tensors are in `dtype` if it is given."""
    model = randomise(Toy(**config))
    model.save_config(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ("head.weight", "same_shift")}
    state = {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for name, tensor in state.items()
    }
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    return state


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a family's tiny model in several files, made once, and its tensors."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = tmp_path_factory.mktemp(name)
            if name == "Toy":
                save_toy(made[name, dtype], dtype)
            else:
                FAMILIES[name].build(dtype=dtype).save_pretrained(made[name, dtype], max_shard_size="100KB")
        return made[name, dtype]

    return folder


@pytest.fixture
def toy(tmp_path) -> Path:
    """The folder of a `Toy` in float32, to be spoilt."""
    save_toy(tmp_path)
    return tmp_path


def loaded(
    group: Group,
    name: str,
    folder: Path,
    dtype: torch.dtype | None,
    plan: dict[str, Any] | None,
    bounce: int = read.BOUNCE_BYTES,
    long_run: int = read.LONG_RUN_BYTES,
) -> dict[str, Any]:
    """What `load` reports, what it did, and every tensor this rank holds."""
    system, read_bytes = os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read_bytes.append(system(descriptor, buffers, offset))
        return read_bytes[-1]

    kept = read.BOUNCE_BYTES, read.LONG_RUN_BYTES
    try:
        os.preadv, read.BOUNCE_BYTES, read.LONG_RUN_BYTES = preadv, bounce, long_run
        with Touched() as touched:
            model, report = tp_layers.load(CLASSES[name], folder, group=group, dtype=dtype, plan=plan, report=True)
    finally:
        os.preadv, (read.BOUNCE_BYTES, read.LONG_RUN_BYTES) = system, kept
    return {
        "report": report,
        "read": sum(read_bytes),
        "described": describe(model).held_bytes,
        "held": sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values()),
        "largest": touched.nbytes,
        "state": model.state_dict(),
    }


def file_bytes(tensor: Tensor, rank: int, size: int, itemsize: int, long_run: int) -> int:
    """Bytes of the file that a rank must ask for to get its part of `tensor`."""
    full = math.prod(tensor.shape) * itemsize
    if tensor.spec is None:
        return full
    ranges = tensor.spec.ranges(rank, size)
    outer = math.prod(tensor.shape[: tensor.spec.dim])
    unit = math.prod(tensor.shape[tensor.spec.dim + 1 :]) * itemsize
    longest = max(stop - start for start, stop, _ in ranges) * unit
    return full if outer > 1 and longest < long_run else outer * unit * sum(stop - start for start, stop, _ in ranges)


def check_reports(
    results: list[dict[str, Any]], described: Report, full: dict[str, torch.Tensor], long_run: int
) -> None:
    size = len(results)
    for rank, result in enumerate(results):
        report: LoadReport = result["report"]
        assert (report.rank, report.size) == (rank, size) and report.seconds > 0
        assert report.bytes_held == described.held_bytes == result["described"] == result["held"]
        wanted = [file_bytes(it, rank, size, full[it.name].element_size(), long_run) for it in described.tensors]
        assert report.bytes_read == result["read"] == sum(wanted)


@names
@sizes
@pytest.mark.parametrize("dtype", [None, HALF], ids=["as it is", "bfloat16 from float32"])
def test_each_rank_holds_and_reads_its_part_and_no_more(ranks, checkpoint, name, size, dtype):
    full = state_of(checkpoint(name))
    described = describe(FAMILIES[name].build(dtype=dtype or torch.float32), size=size)
    results = ranks(size, loaded, name, checkpoint(name), dtype, None)
    check_reports(results, described, full, read.LONG_RUN_BYTES)
    specs = {tensor.name: tensor.spec for tensor in described.tensors}
    for rank, result in enumerate(results):
        assert result["state"].keys() == full.keys()
        for key, tensor in result["state"].items():
            wanted = full[key] if specs[key] is None else specs[key].take(full[key], rank, size)
            assert torch.equal(tensor, wanted.to(tensor.dtype)), key
    sharded = [tensor.full_bytes for tensor in described.tensors if tensor.spec is not None]
    assert len(sharded) > 10
    assert results[0]["report"].bytes_held - described.whole_bytes == sum(sharded) / size


@sizes
@pytest.mark.parametrize("dtype", [None, HALF], ids=["as it is", "bfloat16"])
@pytest.mark.parametrize("long_run", [1, 1 << 20], ids=["long runs", "short runs"])
def test_no_rank_works_on_a_full_planned_weight(ranks, tmp_path, size, dtype, long_run):
    # Shards of several kB, a bounce buffer of 2, and everything else below one.
    full = save_toy(tmp_path, width=48, hidden=256)
    toy = Toy(width=48, hidden=256)
    described = describe(toy if dtype is None else nn.Module.to(toy, dtype), PLAN, size=size)
    results = ranks(size, loaded, "Toy", tmp_path, dtype, PLAN, 2048, long_run)
    check_reports(results, described, full, long_run)
    shard = 48 * 256 * (dtype or torch.float32).itemsize // size
    assert [result["largest"] for result in results] == [shard] * size


def test_the_log_and_the_config_name_what_was_loaded(toy, caplog):
    plan = {"up": "colwise"}
    with pytest.raises(ValueError, match="takes a split input; pass check=False"):
        tp_layers.load(Toy, toy, plan=plan, group=ONE)
    with caplog.at_level(logging.INFO, logger="tp_layers"):
        model, report = tp_layers.load(Toy, toy, plan=plan, group=ONE, check=False, report=True)
    assert sharding_of(model).resolved.notes[0] in caplog.text and str(report) in caplog.text
    assert model.config._name_or_path == str(toy)


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


@pytest.mark.parametrize("argument", ["torch_dtype", "revision", "varian"])
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


def unchanged(folder: Path) -> None:
    pass


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


def test_a_subfolder_is_a_component_of_a_pipeline(tmp_path):
    folder = tmp_path / "transformer"
    folder.mkdir()
    state = save_toy(folder)
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=ONE, subfolder="transformer")
    assert torch.equal(model.up.weight, state["up.weight"])


def in_cache(cache: Path, inside: str = "") -> dict[str, torch.Tensor]:
    """A repository in a hub's cache as the hub's client lays it out: files are links to blobs."""
    repository = cache / "models--someone--toy"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / ("0" * 40) / inside
    for folder in (blobs, snapshot, repository / "refs"):
        folder.mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    state = save_toy(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"{number:064x}", snapshot))
    return state


@pytest.mark.parametrize("subfolder", [None, "transformer"], ids=["a model", "a component of a pipeline"])
def test_a_repository_in_the_cache_is_found_without_a_network(tmp_path, monkeypatch, subfolder):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    state = in_cache(tmp_path, subfolder or "")
    model = tp_layers.load(Toy, "someone/toy", plan=PLAN, group=ONE, subfolder=subfolder)
    assert torch.equal(model.up.weight, state["up.weight"]) and model.config._name_or_path == "someone/toy"
    with pytest.raises(FileNotFoundError):
        tp_layers.load(Toy, "someone/else", plan=PLAN, group=ONE)


@pytest.mark.parametrize("subfolder", [None, "transformer"], ids=["a model", "a component of a pipeline"])
def test_only_the_files_of_the_model_are_downloaded(tmp_path, monkeypatch, subfolder):
    asked = []

    def download(repository: str, *, allow_patterns: list[str]) -> str:
        asked.extend(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    (tmp_path / "transformer").mkdir()
    assert find_folder("someone/toy", subfolder) == tmp_path / (subfolder or "")
    inside = f"{subfolder}/" if subfolder else ""
    wanted = [
        inside + name for name in (
            "config.json", "diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.safetensors.index.json",
            "diffusion_pytorch_model-00001-of-00002.safetensors", "model-00010-of-00012.safetensors",
        )
    ]  # fmt: skip
    others = ["diffusion_pytorch_model.fp16.safetensors", "diffusion_pytorch_model.bin", "flux1-dev.safetensors"]
    others += ["vae/config.json", "vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"]
    others += [f"transformer/{name}" for name in others]
    assert list(filter_repo_objects([*wanted, *others], allow_patterns=asked)) == wanted


@pytest.mark.parametrize("stored", [torch.float32, HALF, torch.float16], ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["Toy", "MiniMaxH3Transformer3DModel", "Flux2Transformer2DModel"])
def test_without_a_dtype_everything_is_as_stored(checkpoint, name, stored):
    folder = checkpoint(name, stored)
    model = tp_layers.load(CLASSES[name], folder, plan=PLAN if name == "Toy" else None, group=ONE)
    state = state_of(folder)
    for key, tensor in model.state_dict(keep_vars=True).items():
        if key in state:
            assert tensor.dtype == state[key].dtype and torch.equal(tensor, state[key]), key


@names
@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=["bfloat16", "float16"])
def test_a_dtype_casts_all_but_what_the_class_keeps_in_float32(checkpoint, name, dtype):
    model = tp_layers.load(CLASSES[name], checkpoint(name), group=ONE, dtype=dtype)
    state, keep = state_of(checkpoint(name)), set(CLASSES[name]._keep_in_fp32_modules or [])
    kept = 0
    for key, tensor in model.state_dict().items():
        is_kept = bool(keep & set(key.split(".")))
        kept += is_kept
        assert tensor.dtype == (torch.float32 if is_kept else dtype), key
        assert torch.equal(tensor, state[key].to(tensor.dtype)), key
    assert bool(kept) == (name == "MiniMaxH3Transformer3DModel")


@names
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=["float32", "bfloat16"])
def test_buffers_and_tables_are_those_of_from_pretrained(checkpoint, name, dtype):
    model = tp_layers.load(CLASSES[name], checkpoint(name), group=ONE, dtype=dtype)
    wanted = attributes(under(dtype, CLASSES[name], FAMILIES[name].config(4)))
    got = attributes(model)
    for key, tensor in wanted.items():
        assert got[key].dtype == tensor.dtype and torch.equal(got[key], tensor), key
    if CLASSES[name]._keep_in_fp32_modules is None:
        # from_pretrained itself, which without accelerate refuses classes that keep modules in float32.
        theirs = CLASSES[name].from_pretrained(checkpoint(name), torch_dtype=dtype, low_cpu_mem_usage=False)
        for key, tensor in [*theirs.state_dict().items(), *attributes(theirs).items()]:
            mine = {**model.state_dict(), **got}[key]
            assert mine.dtype == tensor.dtype and torch.equal(mine, tensor), key


@pytest.mark.parametrize("dtype", [None, HALF], ids=["as stored", "bfloat16"])
def test_buffers_of_a_checkpoint_are_read(tmp_path, dtype):
    state = save_toy(tmp_path)
    state |= {"scale": torch.full((6,), 1.2345), "steps": torch.tensor([7, 8, 9])}
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=ONE, dtype=dtype)
    assert torch.equal(model.scale, state["scale"].to(dtype or torch.float32))
    assert torch.equal(model.steps, state["steps"]) and model.steps.dtype == torch.int64
    # A table that no checkpoint holds, and those in plain attributes.
    assert torch.equal(model.table, under(dtype, Toy, {}).table)
    assert all(not table.is_meta for table in attributes(model).values())


@pytest.mark.parametrize("kept", [["embed.weight"], ["head.weight"], ["embed.weight", "head.weight"]], ids=" and ".join)
def test_tied_parameters_share_one_storage(toy, kept):
    state = state_of(toy)
    value = state.pop("embed.weight")
    save_file({**state, **{name: value.clone() for name in kept}}, toy / "diffusion_pytorch_model.safetensors")
    model, report = tp_layers.load(Toy, toy, plan=PLAN, group=ONE, report=True)
    assert model.embed.weight is model.head.weight and torch.equal(model.head.weight, value)
    assert model.shift is model.same_shift and not model.shift.requires_grad
    held = sum(tensor.nbytes for tensor in state.values()) + value.nbytes
    assert report.bytes_held == held and report.bytes_read == held + (len(kept) - 1) * value.nbytes
    wanted = Toy()
    wanted.load_state_dict({**state, "embed.weight": value, "head.weight": value, "same_shift": state["shift"]})
    x = torch.ones(2, 6)
    assert torch.equal(model(x), wanted(x))


def test_shards_and_buffers_go_to_the_device(toy):
    # meta stands for an accelerator: any device that is not the files' memory.
    model = tp_layers.load(Toy, toy, plan=PLAN, group=ONE, device="meta")
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
    model = tp_layers.load(Toy, toy, plan=PLAN, group=Group(0, 1, torch.device("meta")))
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"meta"}
    model = tp_layers.load(Toy, toy, plan=PLAN, group=Group(0, 1, torch.device("meta")), device="cpu")
    assert {tensor.device.type for tensor in [*model.parameters(), *model.buffers()]} == {"cpu"}


def test_a_file_overwritten_afterwards_changes_nothing(toy):
    model = tp_layers.load(Toy, toy, plan=PLAN, group=ONE)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = toy / "diffusion_pytorch_model.safetensors"
    with open(file, "r+b") as stream:
        stream.write(b"\xff" * file.stat().st_size)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_file_that_shrinks_during_the_load_is_an_error(toy, monkeypatch):
    file = toy / "diffusion_pytorch_model.safetensors"
    system = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        os.truncate(file, 1000)
        return system(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    message = rf"cannot read '[\w.]+' at offset \d+ of {re.escape(str(file))}: the file ends \d+ bytes early"
    with pytest.raises(OSError, match=message):
        tp_layers.load(Toy, toy, plan=PLAN, group=ONE)
