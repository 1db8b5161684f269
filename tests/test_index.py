"""The index: every tensor's dtype, shape and place, from headers alone; whatever does not add up is refused by name."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from tp_layers.loader.index import DTYPES, STEMS, Entry, read_header, read_index

STEM = "diffusion_pytorch_model"
FIRST, SECOND = f"{STEM}-00001-of-00002.safetensors", f"{STEM}-00002-of-00002.safetensors"


def tensors(*names: str) -> dict[str, torch.Tensor]:
    """A tensor for each name, no two alike."""
    return {name: torch.arange(6.0).view(2, 3) + 10 * number for number, name in enumerate(names)}


def write_index(folder: Path, weight_map: object, stem: str = STEM) -> None:
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def several(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint in two files."""
    made = tensors("a", "b", "c")
    save_file({"a": made["a"], "c": made["c"]}, folder / FIRST)
    save_file({"b": made["b"]}, folder / SECOND)
    write_index(folder, {"a": FIRST, "b": SECOND, "c": FIRST})
    return made


def by_hand(file: Path, header: object, data: bytes = b"") -> Path:
    """A file of the safetensors layout with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def info(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


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


def test_a_tensor_in_two_files_is_read_where_the_index_says(tmp_path, caplog):
    old, new = tensors("a"), {"a": torch.full((2, 3), 7.0)}
    save_file(old, tmp_path / FIRST)
    save_file(new, tmp_path / SECOND)
    for chosen, wanted in ((FIRST, old), (SECOND, new), (FIRST, old)):
        write_index(tmp_path, {"a": chosen})
        check(read_index(tmp_path), wanted)
    assert not caplog.records


def test_a_tensor_the_index_does_not_list_is_left_out_with_a_warning(tmp_path, caplog):
    made = several(tmp_path)
    write_index(tmp_path, {"a": FIRST, "b": SECOND})
    del made["c"]
    check(read_index(tmp_path), made)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "'c'" in caplog.text and "'a'" not in caplog.text


def lacking_tensor(folder):
    several(folder)
    write_index(folder, {"a": FIRST, "b": FIRST, "c": FIRST})


def lacking_file(folder):
    several(folder)
    (folder / SECOND).unlink()


def folder_as_file(folder):
    lacking_file(folder)
    (folder / SECOND).mkdir()


def outside(name):
    def make(folder):
        several(folder)
        save_file(tensors("a"), folder.parent / "out.safetensors")
        write_index(folder, {"a": name.format(parent=folder.parent)})

    return make


def index_text(text):
    def make(folder):
        several(folder)
        (folder / f"{STEM}.safetensors.index.json").write_text(text)

    return make


def cut_short(folder):
    several(folder)
    data = (folder / SECOND).read_bytes()
    (folder / SECOND).write_bytes(data[:-1])


def only_pickles(folder):
    torch.save(tensors("a"), folder / f"{STEM}.bin")
    (folder / "config.json").write_text("{}")


def nothing(folder):
    (folder / "config.json").write_text("{}")


NOT_AN_INDEX = r"index\.json is not a checkpoint index"
REFUSED = {
    "an index that names a tensor its file lacks": (
        lacking_tensor, ValueError, rf"index\.json places 'b' in {FIRST}, which does not hold it"),
    "a file that is missing": (lacking_file, FileNotFoundError, rf"{SECOND} is missing from the checkpoint"),
    "a folder in the place of a file": (folder_as_file, FileNotFoundError, rf"{SECOND} is missing from the checkpoint"),
    "the parent folder": (outside("../out.safetensors"), ValueError, r"'\.\./out\.safetensors', which lies outside"),
    "the parent folder, further in": (outside("x/../../out.safetensors"), ValueError, "which lies outside"),
    "the parent folder, with a backslash": (outside("..\\out.safetensors"), ValueError, "which lies outside"),
    "an absolute path": (outside("{parent}/out.safetensors"), ValueError, r"'/.*', which lies outside"),
    "an index that is not JSON": (index_text("{"), ValueError, NOT_AN_INDEX),
    "an index without a weight map": (index_text('{"metadata": {}}'), ValueError, NOT_AN_INDEX),
    "an index that is a list": (index_text("[]"), ValueError, NOT_AN_INDEX),
    "a weight map that is a list": (index_text('{"weight_map": ["a"]}'), ValueError, NOT_AN_INDEX),
    "a weight map of numbers": (index_text('{"weight_map": {"a": 1}}'), ValueError, NOT_AN_INDEX),
    "a weight map of lists": (index_text('{"weight_map": {"a": ["b"]}}'), ValueError, NOT_AN_INDEX),
    "a file cut short": (cut_short, ValueError, rf"{SECOND} is not a whole safetensors file"),
    "pickles only": (only_pickles, FileNotFoundError, rf"it has \['{STEM}\.bin'\].*convert them to safetensors"),
    "no weights at all": (nothing, FileNotFoundError, r"no safetensors weights \(.* or model\) in .*checkpoint$"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path, case):
    make, error, message = REFUSED[case]
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    make(folder)
    with pytest.raises(error, match=message):
        read_index(folder)


BROKEN = {
    "an empty file": b"",
    "a few bytes": b"1234",
    "text": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "a header longer than the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "a header cut short": (20).to_bytes(8, "little") + b'{"x":',
    "a header that is not JSON": b"{'x'",
    "a header that is a list": [],
    "a tensor without a dtype": {"x": {"shape": [4], "data_offsets": [0, 4]}},
    "a tensor without a shape": {"x": {"dtype": "U8", "data_offsets": [0, 4]}},
    "a tensor without offsets": {"x": {"dtype": "U8", "shape": [4]}},
    "an unknown dtype": {"x": info("Q4", [4], 0, 4)},
    "a shape of another size": {"x": info("F32", [2], 0, 4)},
    "a negative extent": {"x": info("U8", [-4], 0, 4)},
    "offsets in reverse": {"x": info("U8", [4], 4, 0)},
    "offsets beyond the file": {"x": info("U8", [8], 0, 8)},
    "ranges that overlap": {"x": info("U8", [3], 0, 3), "y": info("U8", [3], 1, 4)},
    "a gap before the first range": {"x": info("U8", [3], 1, 4)},
    "a gap between ranges": {"x": info("U8", [1], 0, 1), "y": info("U8", [2], 2, 4)},
    "bytes that belong to no tensor": {"x": info("U8", [3], 0, 3)},
    "an overflowing shape": {"x": info("U8", [1 << 40, 1 << 40], 0, 4)},
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_safetensors_refuses_is_refused(tmp_path, case):
    content, file = BROKEN[case], tmp_path / "model.safetensors"
    if isinstance(content, bytes) and not content.startswith(b"{"):
        file.write_bytes(content)
    else:
        by_hand(file, content, bytes(4))
    with pytest.raises(SafetensorError), safe_open(file, framework="pt"):
        pass
    with pytest.raises(ValueError, match=r"model\.safetensors is not a whole safetensors file"):
        read_index(tmp_path)


def test_a_dtype_that_torch_cannot_slice_is_refused_by_name(tmp_path):
    by_hand(tmp_path / "model.safetensors", {"x": info("F4", [8], 0, 4), "y": info("U8", [1], 4, 5)}, bytes(5))
    with pytest.raises(ValueError, match=r"model\.safetensors holds dtypes that cannot be read: F4 \('x'\)$"):
        read_index(tmp_path)
