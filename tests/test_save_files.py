"""`save`: how tensors are divided into files by max_shard_size, and files that were in the folder before."""

import json
import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from checkpoints import identical, names, one_file, resave, state_of
from tp_layers.loader.index import read_index
from tp_layers.loader.save import _plan_files, parse_size
from tp_layers.loader.write import Stored

STEM = "diffusion_pytorch_model"
SIZES = {"one rank": 1, "two ranks": 2, "four ranks": 4}
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model in one file."""
    return one_file(tmp_path_factory)


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


def test_the_size_of_a_tensor_is_asked_for_once(monkeypatch):
    asked = []
    monkeypatch.setattr(Stored, "nbytes", property(lambda item: asked.append(item.name) or 4))
    stored = [Stored(str(number), (1,), torch.float32, None) for number in range(100)]
    assert [len(file) for file in _plan_files(stored, 160)] == [40, 40, 20]
    assert asked == [item.name for item in stored]


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


SPELLINGS = {
    1: 1, 5000: 5000, "5GB": 5 * 10**9, "500MB": 5 * 10**8, "7KB": 7000, "1TB": 10**12, "2GiB": 2 << 30,
    "3MiB": 3 << 20, "4KiB": 4096, "1TiB": 1 << 40, "1.5GB": 1_500_000_000, "0.5KiB": 512, " 10 mb ": 10**7,
    "5gb": 5 * 10**9,
}  # fmt: skip


@pytest.mark.parametrize("size", SPELLINGS, ids=str)
def test_sizes_and_how_they_are_written(size):
    assert parse_size(size) == SPELLINGS[size]


@pytest.mark.parametrize(
    "size", ["", "GB", "5", "5XB", "-5GB", "5GB!", "1e9GB", "0KB", "0.0001KB", 0, -1, 1.5, None, True]
)
def test_sizes_that_are_none(size):
    with pytest.raises(ValueError, match="max_shard_size must be a number of bytes, or such as '5GB', got"):
        parse_size(size)
