"""The reader: on every rank the shard the spec takes of the full tensor, bit for bit, and no byte more than it must."""

import json
import os
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tp_layers.loader import read
from tp_layers.loader.index import DTYPES, Entry, read_header
from tp_layers.plans.spec import ShardSpec

SIZES = (1, 2, 4)
NAMES = {dtype: name for name, dtype in DTYPES.items()}

# Shape and spec of a tensor; every block divides by 4, no two dims of a shape are equal.
SHAPES = {
    "rows": ((8, 6), ShardSpec(0, (8,))),
    "columns": ((6, 8), ShardSpec(1, (8,))),
    "columns, counted from the end": ((6, 8), ShardSpec(-1, (8,))),
    "a bias": ((12,), ShardSpec(0, (12,))),
    "the middle dim of three": ((3, 8, 5), ShardSpec(1, (8,))),
    "the last dim of three": ((3, 5, 8), ShardSpec(2, (8,))),
    "the first dim of three": ((4, 3, 5), ShardSpec(0, (4,))),
    "rows of unequal blocks": ((24, 5), ShardSpec(0, (4, 12, 8))),
    "columns of unequal blocks": ((5, 24), ShardSpec(1, (4, 12, 8))),
    "a bias of unequal blocks": ((16,), ShardSpec(0, (12, 4))),
    "the middle dim of three, in unequal blocks": ((3, 16, 2), ShardSpec(1, (4, 12))),
    "one row": ((1, 8), ShardSpec(1, (8,))),
    "columns of no rows": ((0, 8), ShardSpec(1, (8,))),
    "rows without columns": ((8, 0), ShardSpec(0, (8,))),
    "a whole weight": ((5, 7), None),
    "a whole number": ((), None),
    "a whole tensor without elements": ((3, 0, 2), None),
}

# BOUNCE_BYTES and LONG_RUN_BYTES that force each way through the reader on tensors this small.
WAYS = {
    "as shipped": (read.BOUNCE_BYTES, read.LONG_RUN_BYTES),
    "rows longer than the bounce buffer": (16, 1 << 20),
    "two or three rows at a time": (160, 1 << 20),
    "every run by itself": (1 << 20, 0),
    "every run in pieces": (16, 0),
}
ways = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def through(monkeypatch):
    """Sends every read one way."""

    def choose(way: str) -> None:
        monkeypatch.setattr(read, "BOUNCE_BYTES", WAYS[way][0])
        monkeypatch.setattr(read, "LONG_RUN_BYTES", WAYS[way][1])

    return choose


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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def values(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Elements of `dtype` that differ and that other dtypes round."""
    count = torch.Size(shape).numel()
    if dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(count, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
        return made.to(dtype).view(shape)
    return (torch.arange(count) % (2 if dtype is torch.bool else 101)).to(dtype).view(shape)


def write(folder: Path, tensor: torch.Tensor, before: int = 0) -> Entry:
    """The entry of `tensor`, the only other bytes of its file being `before` and three after it."""
    sizes = {"before": before, "x": tensor.numel() * tensor.element_size(), "after": 3}
    header, offset = {}, 0
    for name, size in sizes.items():
        mine = name == "x"
        header[name] = {
            "dtype": NAMES[tensor.dtype] if mine else "U8",
            "shape": list(tensor.shape) if mine else [size],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = folder / "x.safetensors"
    data = bytes([0xAA] * before) + bits(tensor).numpy().tobytes() + bytes([0xAA] * 3)
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return read_header(file)["x"]


def shard(entry: Entry, spec: ShardSpec | None, rank: int, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """What a rank reads, and the bytes it asked for. The tensor is filled with other bits before."""
    shape = entry.shape if spec is None else spec.local_shape(entry.shape, size)
    target = torch.empty(shape, dtype=dtype)
    bits(target).fill_(0x55)
    with read.reader(rank, size) as files:
        files.read("x", entry, spec, target)
    return target, files.requested


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


def test_a_run_is_long_from_long_run_bytes_on(tmp_path, requests, monkeypatch):
    shape, spec = SHAPES["columns"]
    entry = write(tmp_path, values(shape, torch.float32))
    run = shape[1] // 2 * 4
    for limit, count in ((run, shape[0]), (run + 1, 1)):
        requests.clear()
        monkeypatch.setattr(read, "LONG_RUN_BYTES", limit)
        shard(entry, spec, 0, 2, torch.float32)
        assert len(requests) == count


@pytest.mark.parametrize("way", ["two or three rows at a time", "rows longer than the bounce buffer"])
def test_rows_come_in_bounces_of_whole_rows(tmp_path, requests, through, way):
    # Rows of 64 bytes: two fit into 160, none into 16.
    entry = write(tmp_path, values((5, 16), torch.float32))
    through(way)
    shard(entry, ShardSpec(1, (16,)), 1, 2, torch.float32)
    assert [count for _, count in requests] == ([128, 128, 64] if way.startswith("two") else [64] * 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["as it is", "cast"])
@pytest.mark.parametrize(
    "case", [("rows", 0, 0), ("columns", 1, 0), ("columns, long runs", 1, 1)], ids=lambda it: it[0]
)
def test_no_full_tensor_exists(tmp_path, monkeypatch, case, dtype):
    _, dim, run = case
    monkeypatch.setattr(read, "BOUNCE_BYTES", 4096)
    monkeypatch.setattr(read, "LONG_RUN_BYTES", 1 if run else 1 << 20)
    full = values((64, 256), torch.float32)
    entry, spec = write(tmp_path, full), ShardSpec.of(dim, full.shape[dim])
    with Largest() as seen:
        got, _ = shard(entry, spec, 1, 4, dtype)
    assert torch.equal(got, spec.take(full, 1, 4).to(dtype))
    assert seen.nbytes == got.numel() * got.element_size() < full.numel() * 4


def test_a_buffer_for_rows_that_do_not_fit_holds_one_row(tmp_path, through):
    through("rows longer than the bounce buffer")
    full = values((64, 256), torch.float32)
    entry, spec = write(tmp_path, full), ShardSpec(1, (256,))
    with Largest() as seen:
        got, _ = shard(entry, spec, 0, 256, torch.float32)
    assert torch.equal(got, full[:, :1])
    assert seen.nbytes == 256 * 4


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
