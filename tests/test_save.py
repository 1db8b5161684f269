"""`save`: what was loaded comes back bit for bit, written by rank 0 alone, all of it or nothing."""

import errno
import io
import json
import os
import shutil
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

import tp_layers
from close import randomise
from families import FAMILIES
from test_build import PLAN, Live, Toy
from test_load import CLASSES, save_toy, state_of
from tp_layers.group import Group
from tp_layers.loader import save as save_module
from tp_layers.loader.index import read_header, read_index
from tp_layers.loader.save import parse_size

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


class Big(nn.Module):
    """Four planned weights of 64 kB and next to nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.up_again, self.down_again = nn.Linear(64, 256), nn.Linear(256, 64)


class Configured:
    """A config as transformers' are: it writes itself."""

    def save_pretrained(self, folder: Path) -> None:
        """Writes `config.json`."""
        (Path(folder) / "config.json").write_text('{"model_type": "toy"}')


def identical(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """The same names, dtypes, shapes and bits."""
    return got.keys() == wanted.keys() and all(
        got[name].dtype == tensor.dtype and got[name].shape == tensor.shape and torch.equal(got[name], tensor)
        for name, tensor in wanted.items()
    )


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory):
    """The folder of a tiny model, made once: float32, or bfloat16 with what its class keeps in float32."""
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = tmp_path_factory.mktemp(name)
            if name == "Toy":
                save_toy(made[name, dtype], dtype if dtype is HALF else None)
            else:
                FAMILIES[name].build(dtype=dtype).save_pretrained(made[name, dtype])
        return made[name, dtype]

    return folder


def resave(group: Group, name: str, folder: Path, targets: dict[Path, int | str], plan: dict[str, Any] | None) -> None:
    """Loads a checkpoint over `group` and saves it to each target with its `max_shard_size`."""
    model = tp_layers.load(CLASSES[name], folder, group=group, plan=plan)
    for target, limit in targets.items():
        tp_layers.save(model, target, max_shard_size=limit)
        # Every rank returns once the checkpoint is there.
        read_index(target)


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


@pytest.mark.parametrize("limit", [1, 5000, "20KB", "60KiB"])
def test_files_hold_at_most_max_shard_size(ranks, checkpoint, tmp_path, limit):
    name = "QwenImageTransformer2DModel"
    ranks(2, resave, name, checkpoint(name), {tmp_path: limit}, None)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"{STEM}-{number + 1:05d}-of-{len(files):05d}.safetensors" for number in range(len(files))
    ]
    most = parse_size(limit)
    held = [[tensor.nbytes for tensor in load_file(file).values()] for file in files]
    assert all(sum(sizes) <= most or len(sizes) == 1 for sizes in held)
    # No file could have held the next one's first tensor too.
    assert len(files) > 1 and all(sum(sizes) + max(after) > most for sizes, after in pairwise(held))
    index = json.loads((tmp_path / f"{STEM}.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": sum(map(sum, held))}
    assert index["weight_map"] == {key: file.name for file in files for key in load_file(file)}
    assert identical(state_of(tmp_path), state_of(checkpoint(name)))


def test_every_tensor_starts_at_a_multiple_of_its_element_size(ranks, tmp_path):
    ranks(2, apply_and_save, Plain, tmp_path, {})
    entries = read_header(tmp_path / "model.safetensors").values()
    assert {entry.dtype.itemsize for entry in entries} == {1, 2, 4, 8}
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in entries)


def apply_and_save(group: Group, model_class: type[nn.Module], folder: Path, attributes: dict[str, Any]) -> list[str]:
    """Shards a model in memory and saves it."""
    torch.manual_seed(0)
    model = randomise(model_class())
    for name, value in attributes.items():
        setattr(model, name, value)
    tp_layers.save(tp_layers.apply(model, PLAN, group=group), folder)
    return list(model.state_dict())


@sizes
def test_a_model_without_a_config_is_saved_as_model(ranks, tmp_path, size):
    keys = ranks(size, apply_and_save, Plain, tmp_path, {})[0]
    assert names(tmp_path) == ["model.safetensors"]
    wanted = randomise(Plain()).state_dict()
    assert list(wanted) == keys
    # Tied parameters are one entry, under the first of their names.
    assert torch.equal(wanted["embed.weight"], wanted.pop("head.weight"))
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


@sizes
@pytest.mark.parametrize("limit", ["5GB", "60KB"], ids=["one file", "several files"])
def test_over_the_folder_it_was_loaded_from(ranks, checkpoint, tmp_path, size, limit):
    name = "FluxTransformer2DModel"
    for file in checkpoint(name).iterdir():
        shutil.copy(file, tmp_path)
    ranks(size, resave, name, tmp_path, {tmp_path: limit}, None)
    assert identical(state_of(tmp_path), state_of(checkpoint(name)))
    read_index(tmp_path)


def test_files_of_an_earlier_save_are_removed_and_no_others(ranks, checkpoint, tmp_path):
    name, wanted = "FluxTransformer2DModel", state_of(checkpoint("FluxTransformer2DModel"))
    others = [f"{STEM}.fp16.safetensors.bak", f"{STEM}.fp16.bin", "README.md", "model.bin"]
    for other in others:
        (tmp_path / other).write_text(other)
    counts = []
    for limit in ("20KB", "60KB", "5GB", "60KB"):
        ranks(2, resave, name, checkpoint(name), {tmp_path: limit}, None)
        files = {entry.file.name for entry in read_index(tmp_path).values()}
        index = {f"{STEM}.safetensors.index.json"} if len(files) > 1 else set()
        assert set(names(tmp_path)) == files | index | {"config.json"} | set(others)
        assert identical(state_of(tmp_path), wanted)
        counts.append(len(files))
    assert counts[0] > counts[1] == counts[3] > counts[2] == 1


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


class FullDisk(io.FileIO):
    """A file on a disk with room for `left` bytes in all."""

    left = 0

    def write(self, data: Any) -> int:
        """Takes the data while there is room."""
        if len(data) > FullDisk.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullDisk.left -= len(data)
        return super().write(data)


def full_disk(left: int) -> Callable[[pytest.MonkeyPatch, nn.Module], None]:
    def spoil(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
        FullDisk.left = left
        # As open() does: a buffer before the file, which writes the rest when it is closed.
        patch.setattr(save_module, "open", lambda path, mode: io.BufferedWriter(FullDisk(path, mode)), raising=False)

    return spoil


def failing(what: str, error: Exception, owner: Any = os) -> Callable[[pytest.MonkeyPatch, nn.Module], None]:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise error

    def spoil(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
        patch.setattr(owner or model, what, refuse)

    return spoil


SPOILERS = {
    "a disk that is full": (full_disk(0), "No space left on device"),
    "a disk that fills up in the third file": (full_disk(1000), "No space left on device"),
    "a file that cannot be synchronised": (failing("fsync", OSError(errno.EIO, "input/output error")), "input/output"),
    "a file that cannot be renamed": (failing("replace", PermissionError("not yours")), "not yours"),
    "an index that cannot be written": (failing("write_text", OSError("no index"), Path), "no index"),
    "a config that cannot be written": (
        failing("save_config", TypeError("not serialisable"), None),
        "not serialisable",
    ),
}


def save_spoilt(group: Group, source: Path, target: Path, spoiler: str | None) -> tuple[str, str, float, float]:
    """What a save that fails on rank 0 raises on this rank, after how long, and the next collective's result."""
    model = tp_layers.load(Toy, source, group=group, plan=PLAN)
    start, raised = time.monotonic(), ("nothing", "")
    with pytest.MonkeyPatch.context() as patch:
        if spoiler is not None:
            SPOILERS[spoiler][0](patch, model)
        try:
            tp_layers.save(model, target, max_shard_size=300)
        except Exception as error:
            raised = (type(error).__name__, str(error))
    seconds, total = time.monotonic() - start, torch.ones(())
    dist.all_reduce(total, group=group.process_group)
    return (*raised, seconds, total.item())


def check_failure(results: list[tuple[str, str, float, float]], target: Path, reason: str) -> None:
    for kind, message, seconds, total in results:
        # Still in step: the ranks' next collective is the same.
        assert kind == "OSError" and seconds < 10 and total == len(results)
        assert message.startswith(f"cannot write the checkpoint to {target}: ") and reason in message


@pytest.mark.parametrize("size", [2, 4], ids=["two ranks", "four ranks"])
@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_failure_of_rank_zero_is_raised_on_every_rank_and_leaves_nothing(ranks, checkpoint, tmp_path, size, spoiler):
    old, new = tmp_path / "old", tmp_path / "new"
    old.mkdir()
    save_toy(old)
    before = {file.name: file.read_bytes() for file in old.iterdir()}
    for target in (old, new):
        results = ranks(size, save_spoilt, checkpoint("Toy"), target, spoiler)
        check_failure(results, target, SPOILERS[spoiler][1])
    # The checkpoint that was there still is, and nothing else.
    assert {file.name: file.read_bytes() for file in old.iterdir()} == before
    assert not new.exists() or names(new) == []
    assert ranks(size, save_spoilt, checkpoint("Toy"), new, None)[0][0] == "nothing"
    assert identical(state_of(new), state_of(checkpoint("Toy")))


@pytest.mark.parametrize("below", ["", "transformer"], ids=["the path itself", "a folder on the way"])
def test_a_path_that_is_a_file_is_an_error_on_every_rank(ranks, checkpoint, tmp_path, below):
    file = tmp_path / "file"
    file.write_text("mine")
    results = ranks(2, save_spoilt, checkpoint("Toy"), file / below, None)
    check_failure(results, file / below, "file")
    assert file.read_text() == "mine" and names(tmp_path) == ["file"]


def peak_of_saving(group: Group, folder: Path, limit: str) -> int:
    plan = {"up": "colwise", "down": "rowwise", "up_again": "colwise", "down_again": "rowwise"}
    model = tp_layers.apply(randomise(Big()), plan, group=group)
    with Live() as live:
        tp_layers.save(model, folder, max_shard_size=limit)
    return live.peak


@pytest.mark.parametrize("size", [2, 4], ids=["two ranks", "four ranks"])
@pytest.mark.parametrize("limit", ["5GB", "70KB"], ids=["one file", "several files"])
def test_rank_zero_holds_one_full_parameter_and_one_shard(ranks, tmp_path, size, limit):
    full = 64 * 256 * 4
    first, *others = ranks(size, peak_of_saving, tmp_path, limit)
    assert full <= first <= full + full // size
    assert all(peak < full // size for peak in others)
    assert identical(state_of(tmp_path), randomise(Big()).state_dict())


SPELLINGS = {
    1: 1, 5000: 5000, "5GB": 5 * 10**9, "500MB": 5 * 10**8, "7KB": 7000, "1TB": 10**12, "2GiB": 2 << 30,
    "3MiB": 3 << 20, "4KiB": 4096, "1TiB": 1 << 40, "1.5GB": 1_500_000_000, "0.5KiB": 512, " 10 mb ": 10**7,
    "5gb": 5 * 10**9,
}  # fmt: skip


@pytest.mark.parametrize("size", SPELLINGS, ids=str)
def test_sizes_and_how_they_are_written(size):
    assert parse_size(size) == SPELLINGS[size]


@pytest.mark.parametrize("size", ["", "GB", "5", "5XB", "-5GB", "5GB!", "1e9GB", "0KB", "0.0001KB", 0, -1, 1.5, None])
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes, or such as '5GB', got"):
        parse_size(size)
