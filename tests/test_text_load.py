"""Text encoders without a plan of the caller's: loaded from their own checkpoints, reloaded, described and saved."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import tp_layers
from as_pretrained import tensors, ties
from checkpoints import identical
from close import FLOAT32, relative_error
from families import REGISTERED, run
from tp_layers.describe import describe
from tp_layers.group import Group
from tp_layers.plans.shard import sharding_of
from tp_layers.plans.spec import ShardSpec

TEXT = [label for label, family in REGISTERED.items() if family.config_class]
HALF = torch.bfloat16


class Loaded(NamedTuple):
    """What one rank found."""

    outputs: list[torch.Tensor]
    tensors: dict[str, torch.Tensor]
    ties: list[list[str]]
    specs: dict[str, ShardSpec]
    reloaded: bool


def loaded(group: Group, label: str, folder: Path, dtype: torch.dtype | None) -> Loaded:
    """The model of `folder` on this rank; saved beside it, and read again over other values."""
    family = REGISTERED[label]
    model = tp_layers.load(family.cls, folder, group=group, dtype=dtype)
    before = {name: it.clone() for name, it in tensors(model).items()}
    outputs = run(model, family.inputs(), dtype)
    held = sum(it.nbytes for it in {id(it): it for it in model.state_dict(keep_vars=True).values()}.values())
    assert describe(model).held_bytes == held
    tp_layers.save(model, folder / "again")
    for parameter in model.parameters():
        parameter.data.fill_(7)
    tp_layers.reload(model, folder)
    state = model.state_dict()
    reloaded = identical(state, {name: before[name] for name in state})
    return Loaded(outputs, before, ties(model), sharding_of(model).resolved.specs, reloaded)


def check(ranks: Any, label: str, folder: Path, dtype: torch.dtype | None = None) -> list[list[torch.Tensor]]:
    """Two ranks' outputs and one device's, once all else is found to be as from_pretrained has it."""
    family = REGISTERED[label]
    family.build().save_pretrained(folder, max_shard_size="20KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    whole = family.cls.from_pretrained(folder, dtype=dtype or "auto")
    wanted, results = tensors(whole), ranks(2, loaded, label, folder, dtype)
    for rank, got in enumerate(results):
        assert got.reloaded and got.ties == ties(whole)
        shards = {name: got.specs[name].take(it, rank, 2) if name in got.specs else it for name, it in wanted.items()}
        assert identical(got.tensors, shards)
    assert identical(tensors(family.cls.from_pretrained(folder / "again")), wanted)
    return [*(got.outputs for got in results), run(whole, family.inputs(), dtype)]


@pytest.mark.parametrize("label", TEXT)
def test_a_checkpoint_is_loaded_by_the_class_alone(ranks, tmp_path, label):
    first, second, wanted = check(ranks, label, tmp_path)
    for got, other, reference in zip(first, second, wanted, strict=True):
        assert torch.equal(got, other) and relative_error(got, reference) <= FLOAT32


@pytest.mark.parametrize("dtype", [HALF, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("label", ["T5EncoderModel", "T5EncoderModel, not gated, eager", "UMT5EncoderModel"])
def test_half_precision_with_what_t5_keeps_in_float32(ranks, tmp_path, label, dtype):
    # In float16 the MLP casts its input to the dtype of the weight it reads, of a sharded layer here.
    first, second, wanted = check(ranks, label, tmp_path, dtype)
    exact = run(REGISTERED[label].cls.from_pretrained(tmp_path, dtype=dtype).double(), REGISTERED[label].inputs())
    for got, other, half, reference in zip(first, second, wanted, exact, strict=True):
        assert torch.equal(got, other) and got.dtype == half.dtype
        assert relative_error(got, reference) <= 2 * relative_error(half, reference)
