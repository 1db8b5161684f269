"""`load` and `reload` of sharded snapshots: at the size they were saved at, and cut anew at any other."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tp_layers
from checkpoints import CLASSES, identical, state_of
from families import FAMILIES, run
from refused import refused
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.parts import parts_of
from tp_layers.loader.snapshot import read_snapshot
from tp_layers.plans.shard import sharding_of
from tp_layers.plans.spec import ShardSpec

SIZES = {"one rank": 1, "two ranks": 2, "four ranks": 4}
ONE = Group()


def snapshot(group: Group, name: str, folder: Path, target: Path) -> None:
    model = tp_layers.load(CLASSES[name], folder, group=group, plan=PLAN if name == "Toy" else None)
    tp_layers.save(model, target, sharded=True)


def right(group: Group, name: str, target: Path, full: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, Any]:
    """Whether a rank gets of a snapshot what it gets of the full checkpoint, and the bytes it reads for it."""
    model, report = tp_layers.load(CLASSES[name], target, group=group, dtype=dtype, report=True)
    specs, state = sharding_of(model).resolved.specs, model.state_dict()
    wanted = {
        key: (specs[key].take(tensor, group.rank, group.size) if key in specs else tensor).to(state[key].dtype)
        for key, tensor in full.items()
    }
    output = run(model, FAMILIES[name].inputs(), dtype)
    other = tp_layers.apply(FAMILIES[name].build(dtype=dtype), group=group)
    tp_layers.reload(other, target)
    return {
        "loaded": identical(state, wanted),
        "reloaded": identical(other.state_dict(), wanted),
        "finite": all(bool(item.isfinite().all()) for item in output),
        "read": report.bytes_read == report.bytes_needed,
    }


@pytest.mark.parametrize("saved", SIZES.values(), ids=[f"saved by {key}" for key in SIZES])
@pytest.mark.parametrize("size", SIZES.values(), ids=[f"loaded by {key}" for key in SIZES])
@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "QwenImageTransformer2DModel"])
def test_every_size_gets_its_shards_of_every_size(ranks, tmp_path, name, saved, size):
    FAMILIES[name].build().save_pretrained(tmp_path / "full")
    ranks(saved, snapshot, name, tmp_path / "full", tmp_path / "shards")
    full = state_of(tmp_path / "full")
    for dtype in (torch.float32, torch.bfloat16):
        for result in ranks(size, right, name, tmp_path / "shards", full, dtype):
            # By as many ranks as saved it, or fewer, nothing is read but what is needed.
            assert result["read"] or size > saved
            assert result | {"read": True} == dict.fromkeys(result, True)


def test_a_snapshot_is_whole_again_when_it_is_saved(ranks, tmp_path):
    (tmp_path / "full").mkdir()
    full = save_toy(tmp_path / "full")
    ranks(4, snapshot, "Toy", tmp_path / "full", tmp_path / "shards")
    model = tp_layers.load(Toy, tmp_path / "shards", plan=PLAN, group=ONE)
    assert model.embed.weight is model.head.weight and model.shift is model.same_shift
    tp_layers.save(model, tmp_path / "again")
    assert identical(state_of(tmp_path / "again"), full)


def test_a_plan_that_leaves_whole_what_was_sharded(ranks, tmp_path):
    (tmp_path / "full").mkdir()
    full = save_toy(tmp_path / "full")
    ranks(2, snapshot, "Toy", tmp_path / "full", tmp_path / "shards")
    for plan in ({"down": "rowwise_split_input"}, {"up": "colwise_gather"}):
        model = tp_layers.load(Toy, tmp_path / "shards", plan=plan, group=Group(1, 2))
        specs, state = sharding_of(model).resolved.specs, model.state_dict()
        for name, tensor in full.items():
            assert torch.equal(state[name], specs[name].take(tensor, 1, 2) if name in specs else tensor), name


def test_a_plan_that_cuts_another_dim_is_refused(ranks, tmp_path):
    (tmp_path / "full").mkdir()
    save_toy(tmp_path / "full")
    ranks(2, snapshot, "Toy", tmp_path / "full", tmp_path / "shards")
    plan = {"up": "rowwise_split_input", "down": "colwise_gather"}
    message = (
        r"'up.weight' cannot be read: it was saved in shards along dim 0, the plan cuts dim 1: load it with the plan"
    )
    with pytest.raises(ValueError, match=message):
        tp_layers.load(Toy, tmp_path / "shards", plan=plan, group=Group(1, 2))
    model = tp_layers.load(Toy, tmp_path / "full", plan=plan, group=Group(1, 2))
    with refused(model, "'up.weight' cannot be read", "save it whole"):
        tp_layers.reload(model, tmp_path / "shards")


def test_a_snapshot_has_no_variants(ranks, tmp_path):
    (tmp_path / "full").mkdir()
    save_toy(tmp_path / "full")
    ranks(2, snapshot, "Toy", tmp_path / "full", tmp_path / "shards")
    with pytest.raises(ValueError, match="sharded snapshot, which has no variants, so none called 'fp16'"):
        tp_layers.load(Toy, tmp_path / "shards", plan=PLAN, variant="fp16", group=ONE)


def test_a_dim_may_be_counted_from_the_end(ranks, tmp_path):
    (tmp_path / "full").mkdir()
    save_toy(tmp_path / "full")
    ranks(2, snapshot, "Toy", tmp_path / "full", tmp_path / "shards")
    stored = read_snapshot(tmp_path / "shards")["down.weight"]
    from_the_end = replace(stored, spec=ShardSpec(-1, stored.spec.blocks))
    for size in (1, 2, 4):
        wanted = parts_of(stored, ShardSpec(1, (8,)), 0, size)
        assert wanted == parts_of(stored, ShardSpec(-1, (8,)), 0, size)
        assert wanted == parts_of(from_the_end, ShardSpec(1, (8,)), 0, size)
    assert parts_of(stored, None, 1, 2) == parts_of(from_the_end, None, 1, 2) == parts_of(stored, None, 0, 1)


def test_the_files_of_a_snapshot_are_visited_in_order_and_once_each(ranks, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    save_toy(tmp_path / "full")
    ranks(4, snapshot, "Toy", tmp_path / "full", tmp_path / "shards")
    model = tp_layers.load(Toy, tmp_path / "full", plan=PLAN, group=ONE)
    opened, system = [], os.open

    def open_file(path: object, *args: int, **kwargs: Any) -> int:
        opened.append(str(path))
        return system(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", open_file)
    tp_layers.reload(model, tmp_path / "shards")
    read = [path for path in opened if path.endswith(".safetensors")]
    assert len(read) == 4 and read == sorted(read)
