"""The reader: every rank gets the shard the spec takes of the full tensor, bit for bit, or an error."""

import os
import re
from functools import partial
from pathlib import Path

import pytest
import torch

from read_case import SHAPES, SIZES, bits, send, shard, values, ways, write
from tp_layers.loader import parts, read
from tp_layers.loader.index import DTYPES, Entry, read_header
from tp_layers.plans.spec import Range, ShardSpec


@pytest.fixture
def through(monkeypatch):
    """Sends every read one way."""
    return partial(send, monkeypatch)


def check(full: torch.Tensor, entry: Entry, spec: ShardSpec | None, dtype: torch.dtype) -> None:
    for size in SIZES:
        for rank in range(size):
            wanted = full if spec is None else spec.take(full, rank, size)
            assert torch.equal(bits(shard(entry, spec, rank, size, dtype)[0]), bits(wanted.to(dtype))), (rank, size)


@ways
@pytest.mark.parametrize("case", SHAPES)
def test_every_rank_reads_its_shard(tmp_path, through, way, case):
    shape, spec = SHAPES[case]
    full = values(shape, torch.float32)
    through(way)
    check(full, write(tmp_path, full), spec, torch.float32)


@ways
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=lambda dtype: str(dtype)[6:])
def test_every_dtype_is_read_as_it_is(tmp_path, through, way, dtype):
    through(way)
    for case in ("rows of unequal blocks", "columns of unequal blocks", "a whole number"):
        shape, spec = SHAPES[case]
        full = values(shape, dtype)
        check(full, write(tmp_path, full), spec, dtype)


CASTS = [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float16),
    (torch.float16, torch.bfloat16), (torch.bfloat16, torch.float8_e4m3fn),
]  # fmt: skip


@ways
@pytest.mark.parametrize("case", ["rows", "columns of unequal blocks", "the middle dim of three", "a whole weight"])
@pytest.mark.parametrize(("stored", "wanted"), CASTS, ids=lambda dtype: str(dtype)[6:])
def test_casts_each_element_once(tmp_path, through, way, case, stored, wanted):
    shape, spec = SHAPES[case]
    full = values(shape, stored)
    through(way)
    check(full, write(tmp_path, full), spec, wanted)


@ways
@pytest.mark.parametrize("before", [1, 3])
@pytest.mark.parametrize("case", ["rows", "columns", "a whole number"])
def test_data_at_an_odd_offset(tmp_path, through, way, case, before):
    shape, spec = SHAPES[case]
    full = values(shape, torch.float32)
    entry = write(tmp_path, full, before)
    assert entry.offset % 4
    through(way)
    check(full, entry, spec, torch.float32)
    check(full, entry, spec, torch.bfloat16)


@ways
def test_a_system_that_answers_a_few_bytes_at_a_time(tmp_path, through, monkeypatch, way):
    system = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, offset: system(file, [buffers[0][:7]], offset))
    full = values((6, 24), torch.float32)
    through(way)
    for spec in (ShardSpec(0, (24,)), ShardSpec(1, (4, 12, 8))):
        shaped = full if spec.dim else full.T.contiguous()
        check(shaped, write(tmp_path, shaped), spec, torch.float32)


@ways
@pytest.mark.parametrize("case", ["rows", "columns", "a whole weight"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
def test_a_file_cut_short_after_its_header_was_read(tmp_path, through, way, case, dtype):
    shape, spec = SHAPES[case]
    full = values(shape, torch.float32)
    entry = write(tmp_path, full)
    length = entry.offset + full.numel() * 4 - 5
    os.truncate(entry.file, length)
    through(way)
    # The last rank's shard ends where the tensor does.
    with pytest.raises(OSError) as error:
        shard(entry, spec, 1, 2, dtype)
    assert str(error.value).startswith(f"rank 1 cannot read 'x' at offset {length} of {entry.file}: the file ends ")


def test_a_file_that_is_gone_or_unreadable_is_named(tmp_path, monkeypatch):
    entry = write(tmp_path, values((8, 6), torch.float32))

    where = rf"rank 0 cannot read 'x' at offset {entry.offset} of {re.escape(str(entry.file))}"

    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(OSError, match=rf"{where}: .*Input/output"):
            shard(entry, None, 0, 1, torch.float32)
    entry.file.unlink()
    with pytest.raises(OSError, match=rf"{where}: .*No such file"):
        shard(entry, None, 0, 1, torch.float32)


def test_no_file_stays_open(tmp_path, monkeypatch):
    opened, closed = [], []
    system = os.open, os.close

    def open_file(path: Path, flags: int) -> int:
        opened.append((path, system[0](path, flags)))
        # One that is read, and one that is announced.
        assert len(opened) - len(closed) <= 2
        return opened[-1][1]

    def close_file(descriptor: int) -> None:
        closed.append(descriptor)
        system[1](descriptor)

    folders = [tmp_path / "first", tmp_path / "second"]
    full = values((4, 3), torch.float32)
    for folder in folders:
        folder.mkdir()
    entries = [write(folder, full) for folder in folders]
    os.truncate(entries[1].file, entries[1].offset)
    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "close", close_file)
    of = {"x": entries[0], "y": entries[0], "z": entries[1]}
    jobs = [read.Job(name, parts.whole(entry), torch.empty(4, 3)) for name, entry in of.items()]
    with pytest.raises(OSError, match=r"cannot read 'z' .* ends 48 bytes early"):
        read.read_shards(jobs, 0)
    assert sorted(closed) == sorted(descriptor for _, descriptor in opened)
    assert all(torch.equal(job.target, full) for job in jobs[:2])


@ways
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
def test_a_shard_from_several_stored_tensors(tmp_path, through, way, dtype):
    # Each fills ranges of its own, between those of the other, along the middle dim.
    through(way)
    full = values((3, 8, 5), torch.float32)
    even, odd = (
        [Range(2 * i, 2 * i + 1, 2 * i) for i in range(4)],
        [Range(2 * i + 1, 2 * i + 2, 2 * i + 1) for i in range(4)],
    )
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    entries = write(tmp_path / "a", full), write(tmp_path / "b", full + 1)
    target = torch.full((3, 8, 5), 77.0, dtype=dtype)
    jobs = [
        read.Job("x", parts.Part.of(it, 1, ranges, 8), target) for it, ranges in zip(entries, (even, odd), strict=True)
    ]
    read.read_shards(jobs, 0)
    wanted = torch.where(torch.arange(8).view(1, 8, 1) % 2 == 0, full, full + 1)
    assert torch.equal(target, wanted.to(dtype))


def test_the_caller_hears_of_every_byte_and_can_end_it(tmp_path, monkeypatch):
    monkeypatch.setattr(read, "TICK_BYTES", 64)
    monkeypatch.setattr(read, "PIECES", 2)
    full = values((8, 24), torch.float32)
    entry, counts = write(tmp_path, full), []
    target = torch.empty(8, 12)
    job = read.Job("x", parts.parts_of(entry, ShardSpec(1, (24,)), 1, 2)[0], target)
    assert read.read_shards([job], 1, counts.append) == sum(counts) == 8 * 24 * 4
    assert len(counts) >= 8

    def stop(count: int) -> None:
        raise ValueError("another rank failed")

    target.fill_(3)
    with pytest.raises(ValueError, match="another rank failed"):
        read.read_shards([job], 1, stop)
    assert (target[1:] == 3).all()


def overwrite(file: Path) -> None:
    """Another content in the same place, as `cp` leaves it."""
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    os.utime(file, ns=(0, 0))


def test_a_file_that_was_written_to_since_its_header_was_read_is_refused(tmp_path):
    entry = read_header(write(tmp_path, values((8, 6), torch.float32)).file)["x"]
    job = read.Job("x", parts.whole(entry), torch.empty(8, 6))
    assert read.read_shards([job], 0) == 192
    overwrite(entry.file)
    with pytest.raises(OSError, match=r"rank 0 cannot read 'x' at offset \d+ of .*: .* is not the file whose header"):
        read.read_shards([job], 0)


def test_a_file_that_is_written_to_while_it_is_read_is_refused(tmp_path, monkeypatch):
    entry = read_header(write(tmp_path, values((8, 6), torch.float32)).file)["x"]
    system = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = system(descriptor, buffers, offset)
        overwrite(entry.file)
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(OSError, match=r"rank 3 cannot read 'x' at .*: the file was written to while it was read"):
        read.read_shards([read.Job("x", parts.whole(entry), torch.empty(8, 6))], 3)
