"""Seeded damage to the files of a checkpoint: its bytes, the files themselves, and what happens during a load."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import NamedTuple

# Spoils a file (or its folder): the source of chance, the number of the mutation among those of its kind, the file.
Spoil = Callable[[Random, int, Path], None]


class Kind(NamedTuple):
    """A kind of mutation.

    `target`: what it spoils: "weights" (a safetensors file), "index", "config", "folder" (any of them), or "files" (two
    of the weights).
    `outcome`: "refused" or "loads" where every mutation of the kind must end so, else "either".
    `late`: it happens once the headers have been read.
    """

    target: str
    spoil: Spoil
    count: int
    outcome: str = "either"
    late: bool = False


def weights(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def region(file: Path, name: str) -> tuple[int, int]:
    """Start and stop of the "length", "header" or "data" of a safetensors file, or of "all" of any file."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        header = 8 + int.from_bytes(stream.read(8), "little")
    return {"length": (0, 8), "header": (8, header), "data": (header, size), "all": (0, size)}[name]


def flip(data: bytearray, at: int, random: Random) -> None:
    data[at] ^= 1 << random.randrange(8)


def replace(data: bytearray, at: int, random: Random) -> None:
    data[at] = random.choice(b'"{}[],:0129-.eE\\ \x00\xff') if random.random() < 0.7 else random.randrange(256)


def delete(data: bytearray, at: int, random: Random) -> None:
    del data[at : at + random.randint(1, 12)]


def insert(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = random.choice((b"0", b"9", b"-", b"1e", b'"', b"[", b"}", b",", b"\x00", b"\xed\xa0\x80", b" "))


def repeat(data: bytearray, at: int, random: Random) -> None:
    data[at:at] = data[at : at + random.randint(1, 90)]


def noise(data: bytearray, at: int, random: Random) -> None:
    stop = min(len(data), at + random.randint(2, 64))
    data[at:stop] = random.randbytes(stop - at)


EDITS = {
    "a bit flipped": flip, "a byte replaced": replace, "bytes deleted": delete, "bytes inserted": insert,
    "bytes repeated": repeat, "bytes overwritten": noise,
}  # fmt: skip


def edited(edit: Callable[[bytearray, int, Random], None], where: str, keep_length: bool = False) -> Spoil:
    """Edits a random place of a region. `keep_length`: the length prefix goes on standing for the header."""

    def spoil(random: Random, number: int, file: Path) -> None:
        data, before = bytearray(file.read_bytes()), region(file, where)
        size = len(data)
        edit(data, random.randrange(*before), random)
        if keep_length:
            data[:8] = (before[1] - 8 + len(data) - size).to_bytes(8, "little")
        file.write_bytes(data)

    return spoil


def set_length(random: Random, number: int, file: Path) -> None:
    """A length prefix that is not the header's."""
    right = region(file, "header")[1] - 8
    size = file.stat().st_size
    lengths = (0, 1, 2, right - 1, right + 1, right + 8, size - 9, size - 8, size - 7, size, 10**8, 10**8 + 1, 2**31)
    wrong = (*lengths, 2**32 + right, 2**62, 2**63 - 8, 2**63, 2**64 - 8, 2**64 - 1)[number]
    with open(file, "r+b") as stream:
        stream.write(wrong.to_bytes(8, "little"))


def cut(random: Random, number: int, file: Path) -> None:
    # Ends of the regions first, then anywhere.
    ends = [7, 8, 9, *(region(file, "header")[1] + step for step in (-1, 0, 1)), file.stat().st_size - 1]
    places = ends if file.suffix == ".safetensors" else [1]
    os.truncate(file, places[number] if number < len(places) else random.randrange(1, file.stat().st_size - 1))


def extend(random: Random, number: int, file: Path) -> None:
    with open(file, "ab") as stream:
        stream.write((b"\x00", b" ", b"\n{}", file.read_bytes(), random.randbytes(37))[number])


def empty(random: Random, number: int, file: Path) -> None:
    file.write_bytes(b"")


def scramble(random: Random, number: int, file: Path) -> None:
    file.write_bytes(random.randbytes(random.choice((1, 7, 8, 9, 500))))


def remove(random: Random, number: int, file: Path) -> None:
    file.unlink()


def make(something: Callable[[Path], object]) -> Spoil:
    """Another thing in the place of the file."""

    def spoil(random: Random, number: int, file: Path) -> None:
        file.unlink()
        something(file)

    return spoil


def link_elsewhere(random: Random, number: int, file: Path) -> None:
    (file.parent / "blobs").mkdir(exist_ok=True)
    file.symlink_to(file.rename(file.parent / "blobs" / "0123"))


def swap(random: Random, number: int, folder: Path) -> None:
    first, second = weights(folder)
    first.rename(folder / "other")
    second.rename(first)
    (folder / "other").rename(second)


def copy_over(random: Random, number: int, folder: Path) -> None:
    weights(folder)[number].write_bytes(weights(folder)[1 - number].read_bytes())


def another_whole_file(random: Random, number: int, file: Path) -> None:
    """A file that is right in itself takes its place: the same tensors at other offsets, with other values."""
    data, stop = file.read_bytes(), region(file, "header")[1]
    header = data[8:stop] + b" " * 4 * (number + 1)
    new = file.with_suffix(".new")
    new.write_bytes(len(header).to_bytes(8, "little") + header + bytes(byte ^ 1 for byte in data[stop:]))
    os.replace(new, file)


def _anywhere(target: str, words: str) -> dict[str, Kind]:
    """What can happen to any file."""
    things = {
        "made a folder": Path.mkdir, "made a pipe": os.mkfifo,
        "made a link to nothing": lambda it: it.symlink_to("none"),
        "made a link to itself": lambda it: it.symlink_to(it.name),
        "made a device": lambda it: it.symlink_to("/dev/zero"),
    }  # fmt: skip
    kinds = {f"{words} {what}": Kind(target, make(thing), 2, "refused") for what, thing in things.items()}
    return kinds | {
        f"{words} cut short": Kind(target, cut, 20, "refused"),
        f"{words} extended": Kind(target, extend, 5, "refused" if target == "weights" else "either"),
        f"{words} emptied": Kind(target, empty, 2, "refused"),
        f"{words} of random bytes": Kind(target, scramble, 8, "refused"),
        f"{words} missing": Kind(target, remove, 2, "refused"),
        f"{words} made a link to another folder": Kind(target, link_elsewhere, 2, "loads"),
    }


def _edits(target: str, where: str, words: str, count: int) -> dict[str, Kind]:
    kinds = {f"{words}: {what}": Kind(target, edited(edit, where), count) for what, edit in EDITS.items()}
    if where == "header":
        changed = {name: EDITS[name] for name in ("bytes deleted", "bytes inserted", "bytes repeated")}
        for what, edit in changed.items():
            kinds[f"{words}: {what}, its length too"] = Kind(target, edited(edit, where, keep_length=True), count)
    return kinds


def _late() -> dict[str, Kind]:
    late = partial(Kind, "weights", late=True)
    return {
        "a file cut short after its header was read": late(cut, 20),
        "a file emptied after its header was read": late(empty, 2),
        "a file missing after its header was read": late(remove, 2),
        "a file made a folder after its header was read": late(make(Path.mkdir), 2),
        "a file extended after its header was read": late(extend, 5),
        "data overwritten after the header was read": late(edited(noise, "data"), 8),
        "another whole file after the header was read": late(another_whole_file, 6),
    }


BYTES = {
    **_edits("weights", "header", "header", 12),
    "length: a bit flipped": Kind("weights", edited(flip, "length"), 12, "refused"),
    "length: another number": Kind("weights", set_length, 19, "refused"),
    "data: a bit flipped": Kind("weights", edited(flip, "data"), 12, "loads"),
    "data: bytes overwritten": Kind("weights", edited(noise, "data"), 12, "loads"),
    "data: bytes deleted": Kind("weights", edited(delete, "data"), 8, "refused"),
    "data: bytes inserted": Kind("weights", edited(insert, "data"), 8, "refused"),
    **_anywhere("weights", "a file"),
    **_edits("index", "all", "index", 10),
    **_anywhere("index", "an index"),
    **_edits("config", "all", "config", 10),
    **_anywhere("config", "a config"),
    "two files swapped": Kind("files", swap, 1, "refused"),
    "one file copied over the other": Kind("files", copy_over, 2, "refused"),
    **_late(),
}
