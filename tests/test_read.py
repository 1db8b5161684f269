"""The reader: every rank gets the shard the spec takes of the full tensor, bit for bit, or an error."""

import os
from functools import partial
from pathlib import Path

import pytest
import torch

from read_case import SHAPES, SIZES, bits, send, shard, values, ways, write
from tp_layers.loader import read
from tp_layers.loader.index import DTYPES, Entry
from tp_layers.plans.spec import ShardSpec


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
    assert str(error.value).startswith(f"cannot read 'x' at offset {length} of {entry.file}: the file ends ")


def test_a_file_that_is_gone_or_unreadable_is_named(tmp_path, monkeypatch):
    entry = write(tmp_path, values((8, 6), torch.float32))

    def broken(*args: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(OSError, match=rf"cannot read 'x' at offset {entry.offset} of {entry.file}: .*Input/output"):
            shard(entry, None, 0, 1, torch.float32)
    entry.file.unlink()
    with pytest.raises(OSError, match=rf"cannot read 'x' at offset {entry.offset} of {entry.file}: .*No such file"):
        shard(entry, None, 0, 1, torch.float32)


def test_one_file_is_open_at_a_time_and_none_afterwards(tmp_path, monkeypatch):
    opened, closed = [], []
    system = os.open, os.close

    def open_file(path: Path, flags: int) -> int:
        opened.append((path, system[0](path, flags)))
        assert len(opened) - len(closed) == 1
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
    with pytest.raises(OSError, match="ends 48 bytes early"), read.reader(0, 1) as files:
        for name, entry in (("x", entries[0]), ("y", entries[0]), ("z", entries[1])):
            files.read(name, entry, None, torch.empty(4, 3))
    assert [path for path, _ in opened] == [entry.file for entry in entries]
    assert closed == [descriptor for _, descriptor in opened]
