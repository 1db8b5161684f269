"""`load` and `reload`: the memory of a rank is its shards and a few buffers, seen from outside of torch."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import tp_layers
from host_memory import give_back, most_memory
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.staging import STAGE_BYTES

MIB = 1 << 20
# What Python and the allocators take besides: 1 to 3 MiB where it was measured.
SLACK = 6 * MIB
WIDTH, HIDDEN = 1024, 8192
SECONDS = 0.001


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    """The folder of a `Toy` of 68 MB in float32."""
    folder = tmp_path_factory.mktemp("toy")
    save_toy(folder, width=WIDTH, hidden=HIDDEN)
    return folder


def beyond(group: Group, folder: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """Bytes beyond its shards that a rank took to load, and beyond none to reload; and what the report says."""
    # For what is made once: threads, caches.
    tp_layers.load(Toy, folder, plan=PLAN, group=group, dtype=dtype)
    give_back()
    with most_memory(SECONDS) as loading:
        model, report = tp_layers.load(Toy, folder, plan=PLAN, group=group, dtype=dtype, report=True)
    give_back()
    with most_memory(SECONDS) as reloading:
        tp_layers.reload(model, folder)
    return {
        "load": loading[0] - report.bytes_held,
        "reload": reloading[0],
        "report": report.peak_host_bytes - report.bytes_held,
        "held": report.bytes_held,
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize("size", [1, 2, 4], ids=["one rank", "two ranks", "four ranks"])
def test_a_load_takes_its_shards_and_its_buffers(ranks, toy, size, dtype):
    buffers = STAGE_BYTES if dtype else 0
    for seen in ranks(size, beyond, toy, dtype):
        assert seen["load"] <= buffers + SLACK and seen["reload"] <= buffers + SLACK, seen
        # The rank's own report looks less often, and at the same thing.
        assert -SLACK <= seen["report"] <= seen["load"] + SLACK, seen
        # A second copy of the largest shard, or a full parameter, would not fit into what is allowed.
        assert seen["held"] > 2 * (buffers + SLACK) or size == 4 or dtype


def full(group: Group, folder: Path) -> int:
    """Bytes beyond its shards that a rank takes to load the full model and shard it."""
    give_back()
    with most_memory(SECONDS) as seen:
        model = Toy(WIDTH, HIDDEN)
        model.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"), strict=False)
        tp_layers.apply(model, PLAN, group=group)
    return seen[0] - sum(tensor.nbytes for tensor in model.state_dict().values())


def test_the_measure_sees_a_full_model(ranks, toy):
    nbytes = 4 * 2 * WIDTH * HIDDEN
    assert all(seen > nbytes // 2 for seen in ranks(2, full, toy))


def test_the_sharded_part_falls_as_one_over_size(toy):
    held, requested = {}, {}
    sharded = 4 * (2 * WIDTH * HIDDEN + HIDDEN)
    for size in (1, 2, 4, 8):
        reports = [load_one(toy, rank, size) for rank in range(size)]
        assert len({report.bytes_held for report in reports}) == 1
        held[size], requested[size] = reports[0].bytes_held, [report.bytes_read for report in reports]
    whole = held[1] - sharded
    assert held == {size: whole + sharded // size for size in held}
    columns = 4 * WIDTH * HIDDEN
    for size, each in requested.items():
        # Rows exactly; of columns what is needed, or the whole rows once.
        assert all(held[size] <= count <= held[size] + columns - columns // size for count in each)


def load_one(folder: Path, rank: int, size: int) -> Any:
    """One rank's report, without the memory of the others."""
    return tp_layers.load(Toy, folder, plan=PLAN, group=Group(rank, size), device="meta", report=True)[1]
