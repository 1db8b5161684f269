"""The reader: which bytes of the file it asks for, no more than it must, and the memory it reads them into."""

import itertools
import os
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from read_case import SHAPES, SIZES, send, shard, values, ways, write
from tp_layers.loader import read, staging
from tp_layers.loader.index import Entry
from tp_layers.loader.parts import parts_of
from tp_layers.loader.pieces import rows
from tp_layers.plans.spec import ShardSpec


@pytest.fixture
def through(monkeypatch):
    """Sends every read one way."""
    return partial(send, monkeypatch)


@pytest.fixture
def requests(monkeypatch):
    """Every read of a file as `(offset, bytes)`, as the system answered it."""
    made: list[tuple[int, int]] = []
    system = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = system(descriptor, buffers, offset)
        made.append((offset, count))
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    return made


class Largest(TorchDispatchMode):
    """Bytes of the largest storage any operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        tensors = [item for item in tree_leaves(result) if isinstance(item, torch.Tensor)]
        self.nbytes = max([self.nbytes, *(tensor.untyped_storage().nbytes() for tensor in tensors)])
        return result


def runs(entry: Entry, spec: ShardSpec, rank: int, size: int) -> list[tuple[int, int]]:
    """The runs of bytes in the file that hold a rank's shard, as `(offset, bytes)`, from the full shape alone."""
    count = torch.Size(entry.shape).numel()
    owned = spec.take(torch.arange(count).view(entry.shape), rank, size).flatten().tolist()
    found: list[list[int]] = []
    for element in sorted(owned):
        if found and found[-1][1] == element:
            found[-1][1] += 1
        else:
            found.append([element, element + 1])
    width = entry.dtype.itemsize
    return [(entry.offset + start * width, (stop - start) * width) for start, stop in found]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize(
    "case", ["rows", "rows of unequal blocks", "a bias of unequal blocks", "the first dim of three"]
)
def test_rows_are_read_range_by_range_and_nothing_else(tmp_path, requests, case, dtype):
    shape, spec = SHAPES[case]
    entry = write(tmp_path, values(shape, torch.float32), before=1)
    for size in SIZES:
        for rank in range(size):
            requests.clear()
            _, requested = shard(entry, spec, rank, size, dtype)
            # At size 1 the blocks lie side by side: a read for each, of the bytes of one run.
            wanted = runs(entry, spec, rank, size)
            assert requests == wanted or (size == 1 and sum(count for _, count in requests) == wanted[0][1])
            assert requested == sum(count for _, count in requests)


@pytest.mark.parametrize("case", ["columns", "columns of unequal blocks", "the middle dim of three", "one row"])
def test_short_runs_are_read_with_what_lies_between_them_once(tmp_path, requests, case):
    shape, spec = SHAPES[case]
    full = values(shape, torch.float32)
    entry = write(tmp_path, full)
    for rank in range(2):
        requests.clear()
        _, requested = shard(entry, spec, rank, 2, torch.float32)
        # One outer row: its run is read by itself.
        wanted = [(entry.offset, full.numel() * 4)] if shape[0] > 1 else runs(entry, spec, rank, 2)
        assert requests == wanted and requested == wanted[0][1]


@pytest.mark.parametrize("case", ["columns", "columns of unequal blocks", "the middle dim of three"])
def test_long_runs_are_read_by_themselves(tmp_path, requests, through, case):
    shape, spec = SHAPES[case]
    entry = write(tmp_path, values(shape, torch.float32))
    through("every run by itself")
    for rank in range(2):
        requests.clear()
        _, requested = shard(entry, spec, rank, 2, torch.float32)
        assert requests == runs(entry, spec, rank, 2)
        assert requested == sum(count for _, count in requests)


def test_runs_are_read_by_themselves_where_the_gaps_are_worth_a_call_each(tmp_path, requests, monkeypatch):
    for case, runs_of_a_row in (("columns", 1), ("columns of unequal blocks", 3)):
        shape, spec = SHAPES[case]
        entry = write(tmp_path, values(shape, torch.float32))
        gap = shape[1] // 2 * 4
        for limit, count in ((gap // runs_of_a_row, shape[0] * runs_of_a_row), (gap // runs_of_a_row + 1, 1)):
            requests.clear()
            monkeypatch.setattr(read, "CALL_BYTES", limit)
            shard(entry, spec, 0, 2, torch.float32)
            assert len(requests) == count


@pytest.mark.parametrize(("most", "counts"), [(3, [64] * 5), (5, [128, 128, 64])], ids=["three", "five"])
def test_rows_come_as_many_at_a_time_as_the_system_takes_pieces(tmp_path, requests, monkeypatch, most, counts):
    # Two pieces for each row of 64 bytes: the run, and the rest.
    entry = write(tmp_path, values((5, 16), torch.float32))
    monkeypatch.setattr(read, "PIECES", most)
    shard(entry, ShardSpec(1, (16,)), 1, 2, torch.float32)
    assert [count for _, count in requests] == counts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize(
    "case", [("rows", 0, 0), ("columns", 1, 0), ("columns, long runs", 1, 1)], ids=lambda it: it[0]
)
def test_no_full_tensor_exists(tmp_path, monkeypatch, case, dtype):
    _, dim, run = case
    monkeypatch.setattr(read, "STAGE_BYTES", 4096)
    monkeypatch.setattr(staging, "STAGE_BYTES", 4096)
    monkeypatch.setattr(read, "CALL_BYTES", 0 if run else 1 << 20)
    full = values((64, 256), torch.float32)
    entry, spec = write(tmp_path, full), ShardSpec.of(dim, full.shape[dim])
    with Largest() as seen:
        got, _ = shard(entry, spec, 1, 4, dtype)
    assert torch.equal(got, spec.take(full, 1, 4).to(dtype))
    assert seen.nbytes == got.numel() * got.element_size() < full.numel() * 4


def test_what_lies_between_goes_to_one_buffer_as_long_as_the_widest_gap(tmp_path):
    full = values((64, 256), torch.float32)
    (part,) = parts_of(write(tmp_path, full), ShardSpec(1, (128, 128)), 1, 4)
    data = torch.zeros(64, 64)
    pieces = rows(part, data.view(-1).view(torch.uint8).numpy().data, 256, part.ranges, 64)
    own = [piece for piece in pieces if not isinstance(piece.obj, bytearray)]
    others = [piece for piece in pieces if isinstance(piece.obj, bytearray)]
    assert sum(len(piece) for piece in own) == data.nbytes and sum(map(len, pieces)) == full.nbytes
    # Rank 1 of 4 holds 32 of each 128: 96 lie between them, 64 behind the second and 32 before the next row's first.
    assert {len(piece) for piece in others} == {4 * 32, 4 * 96, 4 * 64}
    assert len({id(piece.obj) for piece in others}) == 1 and len(others[0].obj) == 4 * 192


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize("case", ["rows of unequal blocks", "columns of unequal blocks", "the middle dim of three"])
def test_no_byte_is_asked_for_twice(tmp_path, requests, through, way, case, dtype):
    shape, spec = SHAPES[case]
    full = values(shape, torch.float32)
    entry = write(tmp_path, full)
    through(way)
    for rank in range(2):
        requests.clear()
        shard(entry, spec, rank, 2, dtype)
        asked = sorted(requests)
        assert all(offset + count <= after for (offset, count), (after, _) in itertools.pairwise(asked)), (rank, asked)
