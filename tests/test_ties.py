"""Checkpoints with several of one tied parameter: read once if they are equal, never one of two that differ."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import tp_layers
from as_pretrained import rewrite, ties
from checkpoints import state_of
from refused import refused
from text_models import TEXT_MODELS
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader import ties as compared
from tp_layers.loader.index import read_header
from tp_layers.loader.snapshot import Sharded, Source
from tp_layers.loader.ties import PIECE_BYTES, SAMPLE_BYTES, SAMPLES, same_bytes
from tp_layers.plans.spec import ShardSpec

ONE = Group()
FILE = "diffusion_pytorch_model.safetensors"
# Two pieces and a bit, with a first dim that two ranks can share.
LENGTH = 2 * PIECE_BYTES + 1000


def stored(folder: Path, one: torch.Tensor, other: torch.Tensor) -> tuple[Source, Source]:
    """Two tensors in one file, the second at an odd offset."""
    save_file({"one": one, "other": other, "pad": torch.ones(1, dtype=torch.uint8)}, folder / "x.safetensors")
    header = read_header(folder / "x.safetensors")
    return header["one"], header["other"]


DIFFERENT = {
    "the first byte": 0,
    "a byte between the samples": PIECE_BYTES // 2,
    "the first byte of the second piece": PIECE_BYTES,
    "the last byte": LENGTH - 1,
}


@pytest.mark.parametrize("where", [None, *DIFFERENT])
def test_one_byte_makes_two_tensors_different(tmp_path, where):
    one = torch.arange(LENGTH, dtype=torch.uint8)
    other = one.clone()
    if where is not None:
        other[DIFFERENT[where]] += 1
    assert same_bytes(*stored(tmp_path, one, other)) == (where is None)


KINDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "shape": lambda one: one.view(2, -1),
    "dtype": lambda one: one.view(torch.int8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_bytes_of_another_kind_are_different(tmp_path, kind):
    one = torch.arange(6, dtype=torch.uint8)
    assert not same_bytes(*stored(tmp_path, one, KINDS[kind](one.clone())))


@pytest.fixture
def counts(monkeypatch) -> list[int]:
    """The bytes of each read."""
    found: list[int] = []
    read = compared._read

    def counting(*args):
        found.append(args[-1])
        return read(*args)

    monkeypatch.setattr(compared, "_read", counting)
    return found


def test_no_more_is_read_than_it_takes_to_know(tmp_path, counts):
    one = torch.zeros(LENGTH, dtype=torch.uint8)
    assert same_bytes(*stored(tmp_path, one, one.clone()))
    assert max(counts) == PIECE_BYTES and sum(counts) == 2 * (LENGTH + SAMPLES * SAMPLE_BYTES)
    counts.clear()
    other = one.clone()
    # The second half of a padded vocabulary, say.
    other[LENGTH // 2 :] = 1
    assert not same_bytes(*stored(tmp_path, one, other))
    assert sum(counts) <= 2 * SAMPLES * SAMPLE_BYTES


def test_shards_are_compared_with_shards(tmp_path):
    spec, full = ShardSpec(0, (8,)), torch.arange(24.0).view(8, 3)
    headers = []
    for rank in range(2):
        shard = spec.take(full, rank, 2)
        tensors = {"one": shard, "same": shard.clone(), "late": shard + rank}
        save_file(tensors, tmp_path / f"{rank}.safetensors")
        headers.append(read_header(tmp_path / f"{rank}.safetensors"))
    found = {name: Sharded(spec, (headers[0][name], headers[1][name])) for name in headers[0]}
    assert same_bytes(found["one"], found["same"])
    # Which differs in the second rank's shard alone.
    assert not same_bytes(found["one"], found["late"])
    assert not same_bytes(found["one"], Sharded(ShardSpec(0, (4, 4)), found["same"].shards))
    save_file({"whole": full}, tmp_path / "whole.safetensors")
    assert not same_bytes(found["one"], read_header(tmp_path / "whole.safetensors")["whole"])


def test_a_file_that_has_changed_is_an_error_and_no_difference(tmp_path):
    pair = stored(tmp_path, torch.ones(64), torch.ones(64))
    unknown = [replace(entry, identity=None) for entry in pair]
    file = tmp_path / "x.safetensors"
    whole = file.read_bytes()
    with open(file, "r+b") as stream:
        stream.truncate(len(whole) - 100)
    with pytest.raises(OSError, match=f"ends early, at offset {len(whole) - 100}"):
        same_bytes(*unknown)
    with pytest.raises(OSError, match="is not the file whose header was read"):
        same_bytes(*pair)
    file.rename(tmp_path / "kept")
    file.write_bytes(whole)
    with pytest.raises(OSError, match="is not the file whose header was read"):
        same_bytes(*pair)


MESSAGE = "'embed.weight' and 'head.weight' are one tensor in Toy and differ in the checkpoint"


def both(folder: Path, plus: float) -> torch.Tensor:
    """The folder of a Toy's checkpoint gets both names of its tied parameter; they differ by `plus`."""
    state = save_toy(folder)
    state["head.weight"] = state["embed.weight"] + plus
    save_file(state, folder / FILE)
    return state["embed.weight"]


def test_a_diffusers_model_is_not_loaded_from_two_that_differ(tmp_path):
    both(tmp_path, 1)
    with pytest.raises(ValueError, match=MESSAGE):
        tp_layers.load(Toy, tmp_path, plan=PLAN, group=ONE)


def test_reload_compares_them_too(tmp_path):
    for folder in ("first", "equal", "different"):
        (tmp_path / folder).mkdir()
    save_toy(tmp_path / "first")
    model, loading = tp_layers.load(Toy, tmp_path / "first", plan=PLAN, group=ONE, report=True)
    value = both(tmp_path / "equal", 0)
    _, report = tp_layers.reload(model, tmp_path / "equal", report=True)
    assert model.embed.weight is model.head.weight and torch.equal(model.head.weight, value)
    assert report.bytes_read == loading.bytes_read
    both(tmp_path / "different", 1)
    with refused(model, MESSAGE):
        tp_layers.reload(model, tmp_path / "different")


def test_reload_does_not_untie_a_model_of_transformers(tmp_path):
    text = TEXT_MODELS["T5"]
    text.save(tmp_path)
    model = tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE)
    target = "encoder.embed_tokens.weight"
    rewrite(tmp_path, lambda state: {**state, target: state["shared.weight"] + 1})
    with refused(model, "'shared.weight' and 'encoder.embed_tokens.weight' are one tensor in T5EncoderModel"):
        tp_layers.reload(model, tmp_path)
    rewrite(tmp_path, lambda state: {**state, target: state["shared.weight"]})
    tp_layers.reload(model, tmp_path)
    assert ties(model) and torch.equal(model.shared.weight, state_of(tmp_path)[target])
