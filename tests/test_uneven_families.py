"""Six heads on four ranks, of every thorough family: as one device, through every way in and out."""

from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

import tp_layers
from checkpoints import identical, state_of
from close import FLOAT32, compare, relative_error
from families import FAMILIES, digest, run
from families.family import backward
from test_gradients import EXACT
from tp_layers.group import Group
from tp_layers.loader.report import held_bytes
from tp_layers.loader.snapshot import Sharded, read_snapshot
from tp_layers.plans.registry import plan_for
from tp_layers.plans.scope import Scope
from tp_layers.plans.shard import sharding_of

HEADS, SIZE = 6, 4
names = pytest.mark.parametrize("name", FAMILIES)


def plan_of(name: str) -> Any:
    with torch.device("meta"):
        return plan_for(FAMILIES[name].make(HEADS), modulation="sharded")


def applied(group: Group, name: str) -> tuple[list[torch.Tensor], int]:
    """The outputs of rank 0, and the digest of this rank's."""
    model = tp_layers.apply(FAMILIES[name].build(HEADS), plan_of(name), group=group, uneven=True)
    outputs = run(model, FAMILIES[name].inputs())
    return (outputs if group.rank == 0 else []), digest(outputs)


@names
def test_unequal_parts_give_what_one_device_gives(ranks, name):
    wanted = run(FAMILIES[name].build(HEADS), FAMILIES[name].inputs())
    assert compare(ranks(SIZE, applied, name), wanted) <= FLOAT32


def exact(name: str) -> torch.nn.Module:
    return torch.nn.Module.to(FAMILIES[name].build(HEADS), EXACT)


def gradients(group: Group, name: str) -> dict[str, torch.Tensor | None]:
    model = tp_layers.apply(exact(name), plan_of(name), group=group, uneven=True)
    return backward(model, FAMILIES[name].inputs(), EXACT, calls=2)


@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "LTXVideoTransformer3DModel"])
def test_every_gradient_is_that_of_one_device(ranks, name):
    wanted = backward(exact(name), FAMILIES[name].inputs(), EXACT, calls=2)
    specs = sharding_of(tp_layers.apply(exact(name), plan_of(name), group=Group(0, SIZE), uneven=True)).resolved.specs
    for rank, got in enumerate(ranks(SIZE, gradients, name)):
        for key, full in wanted.items():
            share = specs[key].take(full, rank, SIZE) if key in specs else full
            assert relative_error(got[key], share) <= 1e-12, key


RIGHT = Scope.pieces


def through_heads(self: Scope, kind: str, length: int, size: int, uneven: bool) -> int | None:
    """Equal parts wherever the size divides a length: one and a half heads."""
    return None if length % size == 0 else RIGHT(self, kind, length, size, uneven)


def mlp_by_itself(self: Scope, kind: str, length: int, size: int, uneven: bool) -> int | None:
    """The MLP in one weight with attention in equal parts: a ratio of the two is no longer that of the full weight."""
    mlp = length > max(it.heads for it in self.attentions) * 16
    return None if mlp and length % size == 0 else RIGHT(self, kind, length, size, uneven)


def equal_tables(self: Scope, kind: str, length: int, size: int, uneven: bool) -> int | None:
    """Tables by channels in equal parts, whatever the heads."""
    return None if kind == "heads" and length == 0 else RIGHT(self, kind, length, size, uneven)


def said_of(group: Group, name: str, rule: Any) -> str:
    """What the model's own code says; on all ranks alike, so that none waits for another."""
    Scope.pieces = rule  # type: ignore[method-assign]
    try:
        with pytest.raises(RuntimeError) as raised:
            applied(group, name)
        return str(raised.value)
    finally:
        Scope.pieces = RIGHT  # type: ignore[method-assign]


WRONG = {
    "heads in halves": ("QwenImageTransformer2DModel", through_heads, "unflatten: Provided sizes [-1, 16]"),
    "a ratio that is not kept": ("Flux2Transformer2DModel", mlp_by_itself, "unflatten: Provided sizes [-1, 16]"),
    "a table that is not cut by heads": ("LTXVideoTransformer3DModel", equal_tables, "The size of tensor a ("),
}


@pytest.mark.parametrize(("name", "rule", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_rule_does_not_fit_the_model_s_code(ranks, name, rule, message):
    assert all(message in said for said in ranks(SIZE, said_of, name, rule))


def shards_right(group: Group, name: str, model: torch.nn.Module, full: dict[str, torch.Tensor]) -> bool:
    specs, state = sharding_of(model).resolved.specs, model.state_dict()
    wanted = {key: specs[key].take(it, group.rank, group.size) if key in specs else it for key, it in full.items()}
    return identical(state, wanted)


def through_files(group: Group, name: str, folder: Path) -> dict[str, Any]:
    """Loads, saves whole and sharded, loads the shards again and reloads them, all in unequal parts."""
    plan, full = plan_of(name), state_of(folder / "full")
    how = {"plan": plan, "group": group, "uneven": True}
    model, report = tp_layers.load(getattr(diffusers, name), folder / "full", report=True, **how)
    right = [shards_right(group, name, model, full)]
    outputs = run(model, FAMILIES[name].inputs())
    tp_layers.save(model, folder / "whole", max_shard_size="100KB")
    tp_layers.save(model, folder / "shards", sharded=True)
    again = tp_layers.load(getattr(diffusers, name), folder / "shards", **how)
    mapped = tp_layers.load(getattr(diffusers, name), folder / "full", mmap=True, **how)
    right += [shards_right(group, name, it, full) for it in (again, mapped)]
    for parameter in again.parameters():
        parameter.data.zero_()
    tp_layers.reload(again, folder / "shards")
    right.append(shards_right(group, name, again, full))
    described = tp_layers.describe(model)
    return {
        "outputs": (outputs if group.rank == 0 else [], digest(outputs)),
        "right": right,
        "held": held_bytes(model),
        "reported": report.bytes_held,
        "described": described.held_bytes,
    }


def loaded(group: Group, name: str, folder: Path, uneven: bool) -> bool:
    """Whether a rank gets its shards of the snapshot at another size."""
    how = {"plan": plan_of(name), "group": group, "uneven": uneven}
    model = tp_layers.load(getattr(diffusers, name), folder / "shards", **how)
    return shards_right(group, name, model, state_of(folder / "full"))


@names
def test_every_way_through_files_keeps_every_element(ranks, tmp_path, name):
    model = FAMILIES[name].build(HEADS)
    model.save_pretrained(tmp_path / "full")
    full, wanted = state_of(tmp_path / "full"), run(model, FAMILIES[name].inputs())
    results = ranks(SIZE, through_files, name, tmp_path)
    assert compare([result["outputs"] for result in results], wanted) <= FLOAT32
    assert all(result["right"] == [True] * 4 for result in results)
    held = [result["held"] for result in results]
    assert held == [result["reported"] for result in results] and held[0] == max(held) > min(held)
    assert [result["described"] for result in results] == [held[0]] * SIZE
    assert identical(state_of(tmp_path / "whole"), full)
    stored = [entry for entry in read_snapshot(tmp_path / "shards").values() if isinstance(entry, Sharded)]
    assert any(entry.spec.granules and HEADS in entry.spec.granules for entry in stored)
    for size, uneven in ((1, False), (2, False), (3, False), (4, True)):
        assert ranks(size, loaded, name, tmp_path, uneven) == [True] * size


@pytest.mark.parametrize("saved", [2, 3], ids=["saved by two", "saved by three"])
def test_an_even_snapshot_is_loaded_in_unequal_parts(ranks, tmp_path, saved):
    name = "Flux2Transformer2DModel"
    FAMILIES[name].build(HEADS).save_pretrained(tmp_path / "full")
    ranks(saved, save_shards, name, tmp_path)
    assert ranks(SIZE, loaded, name, tmp_path, True) == [True] * SIZE


def save_shards(group: Group, name: str, folder: Path) -> None:
    model = tp_layers.load(getattr(diffusers, name), folder / "full", plan=plan_of(name), group=group)
    tp_layers.save(model, folder / "shards", sharded=True)
