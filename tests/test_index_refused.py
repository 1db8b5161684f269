"""The index: files and indices that do not add up, and those that safetensors refuses, are refused by name."""

import json

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from index_files import FIRST, SECOND, STEM, by_hand, info, several, tensors, write_index
from tp_layers.loader.index import read_index


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


ONE, TWO = json.dumps(info("U8", [4], 0, 4)), json.dumps(info("U8", [2, 2], 0, 4))
TWICE = {
    "a tensor": f'{{"x": {ONE}, "x": {TWO}}}',
    "a tensor, the same twice": f'{{"x": {ONE}, "x": {ONE}}}',
    "a dtype": '{"x": {"dtype": "F32", "dtype": "U8", "shape": [4], "data_offsets": [0, 4]}}',
}


@pytest.mark.parametrize("case", TWICE)
def test_a_name_that_comes_twice_in_a_header_is_refused(tmp_path, case):
    # safetensors takes the last of two tensors that cover the file.
    by_hand(tmp_path / "model.safetensors", TWICE[case].encode(), bytes(4))
    with pytest.raises(ValueError, match=r"model\.safetensors.*(\['x'\] twice|duplicate field)"):
        read_index(tmp_path)


def test_a_tensor_that_an_index_places_in_two_files_is_refused(tmp_path):
    several(tmp_path)
    (tmp_path / f"{STEM}.safetensors.index.json").write_text(f'{{"weight_map": {{"a": "{FIRST}", "a": "{SECOND}"}}}}')
    with pytest.raises(ValueError, match=r"index\.json is not a checkpoint index: .*\['a'\] twice"):
        read_index(tmp_path)
