"""The index: every tensor's dtype, shape and place, from headers alone."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from index_files import FIRST, SECOND, STEM, by_hand, info, several, tensors, write_index
from tp_layers.loader.index import DTYPES, Entry, read_header, read_index
from tp_layers.loader.layout import STEMS


def stored(entry: Entry) -> torch.Tensor:
    """The tensor that lies where `entry` says."""
    nbytes = math.prod(entry.shape) * entry.dtype.itemsize
    data = bytearray(entry.file.read_bytes()[entry.offset : entry.offset + nbytes])
    assert len(data) == nbytes
    return torch.frombuffer(data, dtype=entry.dtype).view(entry.shape) if data else torch.empty(entry.shape)


def check(entries: dict[str, Entry], wanted: dict[str, torch.Tensor]) -> None:
    assert entries.keys() == wanted.keys()
    for name, entry in entries.items():
        assert (entry.dtype, entry.shape) == (wanted[name].dtype, tuple(wanted[name].shape)), name
        assert torch.equal(stored(entry), wanted[name]), name


@pytest.mark.parametrize("stem", STEMS)
def test_one_file(tmp_path, stem):
    save_file(tensors("a", "b"), tmp_path / f"{stem}.safetensors", metadata={"format": "pt"})
    check(read_index(tmp_path), tensors("a", "b"))


def test_several_files_and_their_index(tmp_path):
    made = several(tmp_path)
    entries = read_index(tmp_path)
    check(entries, made)
    assert {name: entry.file for name, entry in entries.items()} == {
        "a": tmp_path / FIRST, "b": tmp_path / SECOND, "c": tmp_path / FIRST,
    }  # fmt: skip


def test_several_files_under_the_name_of_transformers(tmp_path):
    made = tensors("a", "b")
    for number, name in enumerate(made):
        save_file({name: made[name]}, tmp_path / f"model-{number}.safetensors")
    write_index(tmp_path, {"a": "model-0.safetensors", "b": "model-1.safetensors"}, "model")
    check(read_index(tmp_path), made)


def test_the_index_comes_before_a_single_file(tmp_path):
    made = several(tmp_path)
    save_file(tensors("old"), tmp_path / f"{STEM}.safetensors")
    check(read_index(tmp_path), made)


def test_a_header_lists_its_tensors_in_the_order_of_their_bytes(tmp_path):
    header = {"z": info("U8", [1], 0, 1), "a": info("F32", [], 5, 9), "m": info("I32", [1], 1, 5)}
    file = by_hand(tmp_path / "x.safetensors", {**header, "__metadata__": {"format": "pt"}}, bytes(9))
    entries = read_header(file)
    assert list(entries) == ["z", "m", "a"]
    first = entries["z"].offset
    assert [entry.offset - first for entry in entries.values()] == [0, 1, 5]
    assert first == len(file.read_bytes()) - 9


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype(tmp_path, name):
    dtype = DTYPES[name]
    made = torch.tensor([0, 1, 1, 0, 1, 0]).to(dtype).view(3, 2)
    save_file({"x": made, "one": made[0, 1].clone(), "none": made[:0].clone()}, tmp_path / "model.safetensors")
    entries = read_index(tmp_path)
    assert {key: entry.shape for key, entry in entries.items()} == {"x": (3, 2), "one": (), "none": (0, 2)}
    assert {entry.dtype for entry in entries.values()} == {dtype}
    assert torch.equal(stored(entries["x"]).view(torch.uint8), made.view(torch.uint8))


def test_files_that_are_links_out_of_the_folder(tmp_path):
    # The layout of a hub's cache.
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    made = several(blobs)
    for number, file in enumerate(sorted(blobs.iterdir())):
        file.rename(blobs / f"{number:064x}")
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", f"{number:064x}"))
    check(read_index(snapshot), made)


def test_a_tensor_in_two_files_is_read_where_the_index_says_with_a_warning(tmp_path, caplog):
    old, new, own = tensors("a"), {"a": torch.full((2, 3), 7.0)}, {"b": torch.ones(1), "c": torch.zeros(2)}
    save_file({**old, "b": own["b"]}, tmp_path / FIRST)
    save_file({**new, "c": own["c"]}, tmp_path / SECOND)
    for chosen, other, wanted in ((FIRST, SECOND, old), (SECOND, FIRST, new), (FIRST, SECOND, old)):
        write_index(tmp_path, {"a": chosen, "b": FIRST, "c": SECOND})
        check(read_index(tmp_path), {**wanted, **own})
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert f"places ['a'] elsewhere than in {other}, which has them too: not read there" in caplog.text
        caplog.clear()


def test_a_tensor_the_index_does_not_list_is_left_out_with_a_warning(tmp_path, caplog):
    made = several(tmp_path)
    write_index(tmp_path, {"a": FIRST, "b": SECOND})
    del made["c"]
    check(read_index(tmp_path), made)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'c'" in caplog.text and "'a'" not in caplog.text
