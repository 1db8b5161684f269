"""`load`: each rank reads and holds its shards and no more, whatever becomes of the files."""

import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tp_layers
from checkpoints import CLASSES, several_files, state_of
from families import FAMILIES
from memory import Touched
from toy import PLAN, Toy, save_toy
from tp_layers.describe import Report, Tensor, describe
from tp_layers.group import Group
from tp_layers.loader import parts, read, staging
from tp_layers.loader.report import LoadReport
from tp_layers.plans.shard import sharding_of

ONE = Group()
HALF = torch.bfloat16
SIZES = {"one rank": 1, "two ranks": 2, "four ranks": 4}
names = pytest.mark.parametrize("name", FAMILIES)
sizes = pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The folder of a tiny model in several files."""
    return several_files(tmp_path_factory)


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
    buffers: int = staging.STAGE_BYTES,
    call: int = read.CALL_BYTES,
) -> dict[str, Any]:
    """What `load` reports, what it did, and every tensor this rank holds."""
    system, read_bytes = os.preadv, []

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read_bytes.append(system(descriptor, buffers, offset))
        return read_bytes[-1]

    kept = read.STAGE_BYTES, staging.STAGE_BYTES, parts.LONG_ROW_BYTES, read.CALL_BYTES
    try:
        os.preadv = preadv
        read.STAGE_BYTES = staging.STAGE_BYTES = parts.LONG_ROW_BYTES = buffers
        read.CALL_BYTES = call
        with Touched() as touched:
            model, report = tp_layers.load(CLASSES[name], folder, group=group, dtype=dtype, plan=plan, report=True)
    finally:
        os.preadv = system
        read.STAGE_BYTES, staging.STAGE_BYTES, parts.LONG_ROW_BYTES, read.CALL_BYTES = kept
    return {
        "report": report,
        "read": sum(read_bytes),
        "described": describe(model).held_bytes,
        "held": sum({tensor.data_ptr(): tensor.nbytes for tensor in model.state_dict().values()}.values()),
        "largest": touched.nbytes,
        "state": model.state_dict(),
    }


def file_bytes(tensor: Tensor, rank: int, size: int, itemsize: int, call: int) -> tuple[int, int]:
    """Bytes of the file that are in a rank's part of `tensor`, and those that it asks for to get them."""
    full = math.prod(tensor.shape) * itemsize
    if tensor.spec is None:
        return full, full
    ranges = tensor.spec.ranges(rank, size)
    outer = math.prod(tensor.shape[: tensor.spec.dim])
    unit = math.prod(tensor.shape[tensor.spec.dim + 1 :]) * itemsize
    needed = outer * unit * sum(stop - start for start, stop, _ in ranges)
    worth = full - needed >= outer * len(ranges) * call
    return needed, needed if outer == 1 or worth else full


def check_reports(results: list[dict[str, Any]], described: Report, full: dict[str, torch.Tensor], call: int) -> None:
    size = len(results)
    for rank, result in enumerate(results):
        report: LoadReport = result["report"]
        assert (report.rank, report.size) == (rank, size) and report.seconds > 0
        assert report.bytes_held == described.held_bytes == result["described"] == result["held"]
        wanted = [file_bytes(it, rank, size, full[it.name].element_size(), call) for it in described.tensors]
        assert report.bytes_needed == sum(needed for needed, _ in wanted)
        assert report.bytes_read == result["read"] == sum(asked for _, asked in wanted)


@names
@sizes
@pytest.mark.parametrize("dtype", [None, HALF], ids=["as it is", "bfloat16 from float32"])
def test_each_rank_holds_and_reads_its_part_and_no_more(ranks, checkpoint, name, size, dtype):
    full = state_of(checkpoint(name))
    described = describe(FAMILIES[name].build(dtype=dtype or torch.float32), size=size)
    results = ranks(size, loaded, name, checkpoint(name), dtype, None)
    check_reports(results, described, full, read.CALL_BYTES)
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
@pytest.mark.parametrize("call", [0, 1 << 20], ids=["by runs", "by rows"])
def test_no_rank_works_on_a_full_planned_weight(ranks, tmp_path, size, dtype, call):
    # Shards of several kB, buffers of 2, and everything else below one.
    full = save_toy(tmp_path, width=48, hidden=256)
    toy = Toy(width=48, hidden=256)
    described = describe(toy if dtype is None else nn.Module.to(toy, dtype), PLAN, size=size)
    results = ranks(size, loaded, "Toy", tmp_path, dtype, PLAN, 2048, call)
    check_reports(results, described, full, call)
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
    message = rf"rank 0 cannot read '[\w.]+' at offset \d+ of {re.escape(str(file))}: the file ends \d+ bytes early"
    with pytest.raises(OSError, match=message):
        tp_layers.load(Toy, toy, plan=PLAN, group=ONE)
