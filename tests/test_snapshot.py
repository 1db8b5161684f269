"""`save(sharded=True)`: each rank writes its shards and no more, and from them come any rank's shards at any size."""

import json

import pytest
import torch
from safetensors import safe_open
from torch import nn

import tp_layers
from big import BIG_PLAN, Big
from checkpoints import identical, names, one_file, state_of
from close import randomise
from families import FAMILIES
from memory import Live
from snapshots import save_snapshot, shard_of, tensor_of, whole
from toy import PLAN, Toy
from tp_layers.loader.snapshot import Sharded, is_snapshot, read_snapshot

SIZES = {"one rank": 1, "two ranks": 2, "four ranks": 4}
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
models = pytest.mark.parametrize("name", ["Toy", *FAMILIES])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model in one file."""
    return one_file(tmp_path_factory)


def plan_of(name):
    return PLAN if name == "Toy" else None


@models
@sizes
def test_shards_for_any_size_come_from_a_snapshot_of_any_size(ranks, checkpoint, tmp_path, name, size):
    source = checkpoint(name, torch.float32 if name == "Toy" else torch.bfloat16)
    ranks(size, save_snapshot, name, source, tmp_path, plan_of(name))
    wanted, found = state_of(source), read_snapshot(tmp_path)
    assert found.keys() == wanted.keys() and identical(whole(tmp_path), wanted)
    sharded = {key: entry for key, entry in found.items() if isinstance(entry, Sharded)}
    assert len(sharded) >= 3
    for key, entry in sharded.items():
        assert len(entry.shards) == size and (entry.shape, entry.dtype) == (wanted[key].shape, wanted[key].dtype)
        for other in SIZES.values():
            for rank in range(other):
                shard = shard_of(key, entry, entry.spec, rank, other)
                assert torch.equal(shard, entry.spec.take(wanted[key], rank, other))
                # At the same size, the file holds it as it is.
                assert other != size or torch.equal(shard, tensor_of(key, entry.shards[rank]))


@sizes
def test_a_rank_writes_its_own_shards_and_rank_zero_what_is_whole(ranks, checkpoint, tmp_path, size):
    source = checkpoint("Toy")
    ranks(size, save_snapshot, "Toy", source, tmp_path, PLAN)
    manifest = json.loads((tmp_path / "tp_layers.json").read_text())
    files = manifest["files"]
    assert manifest == {"version": 1, "size": size, "files": files} and is_snapshot(tmp_path)
    assert names(tmp_path) == sorted(["config.json", "tp_layers.json", *files])
    token = files[0].split("-")[1]
    assert files == [f"tp_layers-{token}-{rank + 1:05d}-of-{size:05d}.safetensors" for rank in range(size)]
    planned = {"up.weight": (0, [8]), "up.bias": (0, [8]), "down.weight": (1, [8])}
    specs = {name: {"dim": dim, "blocks": blocks} for name, (dim, blocks) in planned.items()}
    for rank, file in enumerate(files):
        with safe_open(tmp_path / file, framework="pt") as opened:
            metadata = opened.metadata()
            held = set(opened.keys())
        assert metadata.keys() == {"format", "tp_layers"} and metadata["format"] == "pt"
        assert json.loads(metadata["tp_layers"]) == {"version": 1, "rank": rank, "size": size, "specs": specs}
        # Tied parameters are one entry, under the first of their names.
        assert held == (set(state_of(source)) if rank == 0 else set(planned))
    config = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "config.json").read_text()) == {**config, "_name_or_path": str(source)}


def test_a_snapshot_replaces_one_of_another_size(ranks, checkpoint, tmp_path):
    source, others = checkpoint("Toy"), ["README.md", "tp_layers.txt"]
    for other in others:
        (tmp_path / other).write_text(other)
    for size in (4, 2, 1, 2):
        ranks(size, save_snapshot, "Toy", source, tmp_path, PLAN)
        files = json.loads((tmp_path / "tp_layers.json").read_text())["files"]
        assert len(files) == size and names(tmp_path) == sorted([*files, *others, "config.json", "tp_layers.json"])
        assert identical(whole(tmp_path), state_of(source))


class Bare(nn.Module):
    """No config; the tensors before the pair have an odd number of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("nothing", torch.empty(0, 4))
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)


def save_bare(group, folder):
    tp_layers.save(tp_layers.apply(randomise(Bare()), PLAN, group=group), folder, sharded=True)


def test_a_model_without_a_config(ranks, tmp_path):
    ranks(2, save_bare, tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert identical(whole(tmp_path), randomise(Bare()).state_dict())


def test_every_tensor_starts_at_a_multiple_of_its_element_size(ranks, tmp_path):
    ranks(2, save_bare, tmp_path)
    found = read_snapshot(tmp_path).values()
    entries = [part for entry in found for part in (entry.shards if isinstance(entry, Sharded) else [entry])]
    assert all(entry.offset % entry.dtype.itemsize == 0 for entry in entries)
    assert list(found) == sorted(found, key=lambda entry: (str(entry.file), entry.offset))


def peak_of_saving(group, folder):
    model = tp_layers.apply(randomise(Big()), BIG_PLAN, group=group)
    with Live() as live:
        tp_layers.save(model, folder, sharded=True)
    return live.peak


def test_no_rank_copies_a_tensor(ranks, tmp_path):
    # What the ranks tell each other; the smallest shard has 16 kB.
    assert all(peak < 8000 for peak in ranks(4, peak_of_saving, tmp_path))
    assert identical(whole(tmp_path), randomise(Big()).state_dict())


def test_a_shard_is_no_model_that_others_would_load(ranks, checkpoint, tmp_path):
    ranks(1, save_snapshot, "Toy", checkpoint("Toy"), tmp_path, PLAN)
    with pytest.raises(OSError, match="no file named diffusion_pytorch_model"):
        Toy.from_pretrained(tmp_path, low_cpu_mem_usage=False)
