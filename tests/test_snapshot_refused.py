"""A snapshot that is broken, or whose files do not fit each other, is refused, and the file and the tensor named."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from snapshots import save_toy_snapshot
from tp_layers.loader.snapshot import is_snapshot, read_snapshot

MANIFEST = "tp_layers.json"


@pytest.fixture(scope="module")
def snapshot(pool, tmp_path_factory):
    """A snapshot of a `Toy` from two ranks."""
    folder = tmp_path_factory.mktemp("snapshot")
    pool.run(save_toy_snapshot, folder, 0, size=2)
    return folder


def manifest(**changes):
    """Changes the manifest; a function is called with the old value."""

    def change(folder: Path) -> None:
        told = json.loads((folder / MANIFEST).read_text())
        for key, value in changes.items():
            told[key] = value(told[key]) if callable(value) else value
        (folder / MANIFEST).write_text(json.dumps({key: value for key, value in told.items() if value is not None}))

    return change


def file_of(folder: Path, rank: int) -> Path:
    return folder / json.loads((folder / MANIFEST).read_text())["files"][rank]


def about(number, /, **changes):
    """Changes what the file of rank `number` says of itself."""

    def change(folder: Path) -> None:
        file = file_of(folder, number)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        told = json.loads(metadata["tp_layers"])
        for key, value in changes.items():
            told[key] = value(told[key]) if callable(value) else value
        save_file(load_file(file), file, {**metadata, "tp_layers": json.dumps(told)})

    return change


def cut(**changes):
    """Changes how the specs cut 'up.weight'."""
    return lambda specs: {**specs, "up.weight": {**specs["up.weight"], **changes}}


def held(rank, name, tensor):
    """Puts `tensor` into the file of `rank` under `name`; None takes it out."""

    def change(folder: Path) -> None:
        file = file_of(folder, rank)
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
        tensors = {**load_file(file), name: tensor}
        save_file({key: value for key, value in tensors.items() if value is not None}, file, metadata)

    return change


def metadata(rank, text):
    """Gives the file of `rank` another text in its metadata; None takes it out."""

    def change(folder: Path) -> None:
        file = file_of(folder, rank)
        save_file(load_file(file), file, {"format": "pt"} | ({} if text is None else {"tp_layers": text}))

    return change


def both(change):
    """The same in the files of both ranks."""

    def change_both(folder: Path) -> None:
        change(0)(folder)
        change(1)(folder)

    return change_both


def cut_short(folder: Path) -> None:
    file = file_of(folder, 1)
    file.write_bytes(file.read_bytes()[:-1])


FIRST, SECOND = "-00001-of-00002.safetensors", "-00002-of-00002.safetensors"
BROKEN = {
    "a manifest that is no JSON": (lambda folder: (folder / MANIFEST).write_text("{"), ("is not the manifest",)),
    "a manifest that is a list": (lambda folder: (folder / MANIFEST).write_text("[]"), ("is not the manifest",)),
    "a manifest that is no text": (lambda folder: (folder / MANIFEST).write_bytes(b"\xff"), ("is not the manifest",)),
    "a manifest without files": (manifest(files=None), (MANIFEST, "'files'")),
    "a later version": (manifest(version=2), (MANIFEST, "is of version 2, written by a later tp_layers")),
    "no version": (manifest(version="1"), (MANIFEST, "no version that is known here, but '1'")),
    "too few files": (manifest(size=3), (MANIFEST, "has size 3, which is not the number of its files")),
    "no files": (manifest(size=0, files=[]), (MANIFEST, "has size 0")),
    "a size that is no number": (manifest(size=True, files=lambda files: files[:1]), (MANIFEST, "has size True")),
    "files that are no list": (manifest(size=2, files="ab"), (MANIFEST, "has size 2")),
    "a file above": (manifest(files=lambda files: [f"../{files[0]}", files[1]]), ("'../tp_", "no file of its")),
    "the folder above": (manifest(files=lambda files: ["..", files[1]]), (MANIFEST, "'..'", "no file of its folder")),
    "no name": (manifest(files=lambda files: ["", files[1]]), (MANIFEST, "''", "no file of its folder")),
    "an absolute name": (manifest(files=lambda files: [f"/{files[0]}", files[1]]), (MANIFEST, "no file of its folder")),
    "a name of another system": (manifest(files=lambda files: [files[0], "a\\b"]), (MANIFEST, "no file of its folder")),
    "a name that is a number": (manifest(files=lambda files: [files[0], 7]), (MANIFEST, "names 7, which is no file")),
    "a file for two ranks": (manifest(files=lambda files: [files[0]] * 2), (MANIFEST, FIRST, "for two ranks")),
    "files in another order": (manifest(files=lambda files: files[::-1]), (SECOND, "is of rank 1 of 2", "rank 0 of 2")),
    "a file cut short": (cut_short, (SECOND, "is not a whole safetensors file")),
    "a file without metadata": (metadata(1, None), (SECOND, "does not say in its metadata whose shards")),
    "metadata that is no JSON": (metadata(1, "{"), (SECOND, "does not say in its metadata whose shards")),
    "metadata that is a list": (metadata(0, "[]"), (FIRST, "does not say in its metadata whose shards")),
    "specs that are a list": (about(0, specs=[]), (FIRST, "does not say in its metadata whose shards")),
    "a file of a later version": (about(1, version=3), (SECOND, "is of version 3")),
    "a file of another size": (about(1, size=4), (SECOND, "is of rank 1 of 4")),
    "a file of another rank": (about(1, rank=0), (SECOND, "is of rank 0 of 2")),
    "a cut along no dim": (both(lambda rank: about(rank, specs=cut(dim="0"))), ("'up.weight'", "'0'", "is no cut")),
    "a cut of no blocks": (both(lambda rank: about(rank, specs=cut(blocks=[]))), ("'up.weight'", "which is no cut")),
    "a block of nothing": (both(lambda rank: about(rank, specs=cut(blocks=[8, 0]))), ("'up.weight'", "is no cut")),
    "blocks that are a number": (both(lambda rank: about(rank, specs=cut(blocks=8))), ("whose shards it holds",)),
    "a cut along a dim that is not there": (
        both(lambda rank: about(rank, specs=cut(dim=2))),
        (FIRST, "cannot hold a shard of 'up.weight'"),
    ),
    "blocks that two ranks do not divide": (
        both(lambda rank: about(rank, specs=cut(blocks=[5, 3]))),
        (FIRST, "cannot hold a shard of 'up.weight'", "a block of 5 along dim 0 is not divisible by 2 ranks"),
    ),
    "granules that are no list": (
        both(lambda rank: about(rank, specs=cut(granules=2))), (FIRST, "'up.weight' in granules 2, which is no cut"),
    ),
    "granules of nothing": (
        both(lambda rank: about(rank, specs=cut(granules=[0]))), (FIRST, "in granules [0], which is no cut"),
    ),
    "granules of too few blocks": (
        both(lambda rank: about(rank, specs=cut(blocks=[4, 4], granules=[4]))),
        (FIRST, "in granules [4], which is no cut: the blocks [4, 4] do not consist of [4] equal pieces"),
    ),
    "granules that the block is not made of": (
        both(lambda rank: about(rank, specs=cut(granules=[3]))),
        (FIRST, "in granules [3], which is no cut: the blocks [8] do not consist of [3] equal pieces"),
    ),
    "granules of another cut": (
        both(lambda rank: about(rank, specs=cut(granules=[1]))), (FIRST, "'up.weight' as (4, 6)", "of 2 by", "(8, 6)"),
    ),
    "granules in one file only": (about(1, specs=cut(granules=[4])), (SECOND, "cuts 'up.weight' by", "granules=(4,)")),
    "a cut of a larger tensor": (
        both(lambda rank: about(rank, specs=cut(blocks=[16]))),
        (FIRST, "'up.weight' as (4, 6)", "of 2 by", "is (8, 6)"),
    ),
    "specs that disagree": (about(1, specs=cut(blocks=[4, 4])), (SECOND, "cuts 'up.weight' by", "(4, 4)", FIRST)),
    "a spec in one file only": (
        about(1, specs=lambda specs: {**specs, "shift": {"dim": 0, "blocks": [6]}}),
        (SECOND, "cuts 'shift' by", "by None"),
    ),
    "a spec of nothing": (
        both(lambda rank: about(rank, specs=lambda specs: {**specs, "odd": {"dim": 0, "blocks": [6]}})),
        (FIRST, "lacks its shard of 'odd'"),
    ),
    "a shard that is missing": (held(1, "down.weight", None), (SECOND, "lacks its shard of 'down.weight'")),
    "a first shard that is missing": (held(0, "down.weight", None), (FIRST, "lacks its shard of 'down.weight'")),
    "a shard of another dtype": (
        held(1, "up.weight", torch.zeros(4, 6, dtype=torch.float16)),
        (SECOND, "holds 'up.weight' as torch.float16 (4, 6)", FIRST, "torch.float32"),
    ),
    "a shard of another shape": (held(1, "up.weight", torch.zeros(2, 6)), (SECOND, "torch.float32 (2, 6)")),
    "a whole tensor in a later file": (held(1, "shift", torch.zeros(6)), (SECOND, "holds 'shift', which is no shard")),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_snapshot_is_refused(snapshot, tmp_path, case):
    folder = tmp_path / "broken"
    shutil.copytree(snapshot, folder)
    change, message = BROKEN[case]
    read_snapshot(folder)
    change(folder)
    with pytest.raises(ValueError) as raised:
        read_snapshot(folder)
    assert [part for part in message if part not in str(raised.value)] == [], str(raised.value)


@pytest.mark.parametrize("rank", [0, 1], ids=["the first", "the last"])
def test_a_missing_file_is_named(snapshot, tmp_path, rank):
    folder = tmp_path / "broken"
    shutil.copytree(snapshot, folder)
    missing = file_of(folder, rank)
    missing.unlink()
    with pytest.raises(FileNotFoundError, match=f"{missing.name} is missing"):
        read_snapshot(folder)


def test_a_folder_without_a_manifest_is_no_snapshot(snapshot, tmp_path):
    assert is_snapshot(snapshot) and not is_snapshot(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no sharded snapshot: it has no tp_layers"):
        read_snapshot(tmp_path)


def test_files_may_be_links_that_leave_the_folder(snapshot, tmp_path):
    # As in a hub's cache.
    for file in snapshot.iterdir():
        (tmp_path / file.name).symlink_to(file)
    assert read_snapshot(tmp_path).keys() == read_snapshot(snapshot).keys()
