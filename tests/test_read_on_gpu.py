"""The reader onto a CUDA device: through pinned buffers, cast there, and the same bits as on the CPU."""

from functools import partial

import pytest
import torch

from read_case import SHAPES, SIZES, bits, send, values, ways, write
from tp_layers.loader import read
from tp_layers.loader.parts import parts_of

pytestmark = pytest.mark.gpu


@pytest.fixture
def through(monkeypatch):
    """Sends every read one way."""
    return partial(send, monkeypatch)


@ways
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
def test_every_rank_reads_its_shard_onto_the_device(tmp_path, through, way, case, dtype):
    shape, spec = SHAPES[case]
    full = values(shape, torch.float32)
    entry = write(tmp_path, full)
    through(way)
    for size in SIZES:
        for rank in range(size):
            wanted = (full if spec is None else spec.take(full, rank, size)).to(dtype)
            target = torch.full_like(wanted, 3, device="cuda")
            (part,) = parts_of(entry, spec, rank, size)
            read.read_shards([read.Job("x", part, target)], rank)
            assert torch.equal(bits(target.cpu()), bits(wanted)), (rank, size)


def test_a_buffer_is_not_filled_again_before_its_copy_is_done(tmp_path, monkeypatch):
    # Many copies out of few small buffers, behind a device that is busy.
    monkeypatch.setattr(read, "STAGE_BYTES", 4096)
    full = torch.arange(1 << 20, dtype=torch.float32)
    entry = write(tmp_path, full)
    busy = torch.randn(8192, 8192, device="cuda")
    target = torch.zeros(1 << 20, device="cuda")
    for _ in range(4):
        busy = busy @ busy
    (part,) = parts_of(entry, None, 0, 1)
    read.read_shards([read.Job("x", part, target)], 0)
    assert torch.equal(target.cpu(), full)
