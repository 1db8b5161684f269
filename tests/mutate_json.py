"""Seeded changes to the index and the config of a checkpoint, and to what its files hold together."""

import json
from functools import partial
from pathlib import Path
from random import Random

from index_files import STEM
from mutate import Kind, weights
from mutate_header import DEEP, WRONG, parts, renamed, tensors, with_token, write

# The file of a tensor: {name} is the right one.
PLACES = (
    *WRONG, '"."', '".."', '"/"', '"../{name}"', '"sub/../{name}"', '"..\\\\{name}"', '"\\u0000"', '"\\ud800"',
    '"{other}"', '"config.json"', '"{index}"', '"{name}\\u0000"', '"{name} "', '"' + "x" * 300 + '"',
    '"{folder}/{name}"', '"' + "x/" * 5000 + '"', '{{"{name}": 1}}', '["{name}"]', '"{name}/{name}"', '"~/{name}"',
    '"none"', '"{upper}"',
)  # fmt: skip
# A width of the model, of which 6 or 8 is right. The huge ones do not fit any memory.
NUMBERS = (
    *WRONG, "0", "7", '"6"', "6.0", "-6", "false", "9223372036854775807", "4611686018427387904", "[6]", '{{"a": 6}}',
    "1e30", '"{{}}"',
)  # fmt: skip
# Keys that diffusers itself reads from a config.
KEYS = [
    ("_class_name", WRONG), ("_diffusers_version", WRONG), ("_name_or_path", WRONG), ("_use_default_values", WRONG),
    ("quantization_config", ('"bnb"', "{{}}", "[]", "1")), ("self", WRONG[:3]), ("config", WRONG[:3]), ("", WRONG[:3]),
]  # fmt: skip
PAIRS = [(key, token) for key, tokens in KEYS for token in tokens]
NAMES = (
    "",
    "up",
    "up.weight ",
    "UP.weight",
    "up..weight",
    ".",
    "a" * 10_000,
    "é",
    "\x00",
    "module.up.weight",
    "/",
    "\n",
)
TEXTS = (
    "{", "[]", "null", "1", '""', "true", "{1: 2}", "{'a': 1}", '{"a": 1,}', "NaN", "-Infinity", "\x00", '"\\ud800"',
    "[" * DEEP, '{"a":' * DEEP, '{"a":' + "[" * DEEP + "]" * DEEP + "}", '{"a": ' + "9" * 5000 + "}",
)  # fmt: skip
MAPS = (
    "{}", '{"weight_map": []}', '{"weight_map": null}', '{"weight_map": "a"}', '{"weight_map": {}}',
    '{"weight_map": 1}', '{"weight_map": [["up.weight", "x"]]}', '{"weight_map": {"up.weight": {}}}',
    '{"weight_map":' * DEEP, '{"\\ud800": "\\ud800"}', '{"weight_map": {"\\ud800": "\\ud800"}}',
)  # fmt: skip


def text(texts: tuple[str, ...], random: Random, number: int, file: Path) -> None:
    file.write_text(texts[number], encoding="utf-8")


def encode(random: Random, number: int, file: Path) -> None:
    """The text in another encoding, or with something in it or after it."""
    old = file.read_text()
    new = (
        old.encode("utf-16"), old.encode("utf-8-sig"), old.encode("utf-32"), old.encode("utf-16-be"),
        old.encode() + b"\xff", old.encode() + b"\x00", old.replace("{", "{//", 1).encode(), old.encode() + b"{}",
    )  # fmt: skip
    file.write_bytes(new[number])


def place(random: Random, number: int, file: Path) -> None:
    """Another text for the file of one tensor."""
    index = json.loads(file.read_text())
    name = random.choice(sorted(index["weight_map"]))
    own = index["weight_map"][name]
    other = next(path.name for path in weights(file.parent) if path.name != own)
    index["weight_map"][name] = "@@"
    words = dict(name=own, other=other, index=file.name, folder=file.parent, upper=own.upper())
    file.write_text(with_token(index, PLACES[number].format(**words)))


def unlist(random: Random, number: int, file: Path) -> None:
    index = json.loads(file.read_text())
    del index["weight_map"][random.choice(sorted(index["weight_map"]))]
    file.write_text(json.dumps(index))


def listed(file: Path, new: str, old: str | None = None) -> None:
    """Lists the tensor `new` in the place of `old` where the checkpoint of the weights `file` has an index."""
    index = file.parent / f"{STEM}.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"].pop(old, None)
        content["weight_map"][new] = file.name
        index.write_text(json.dumps(content))


def list_more(random: Random, number: int, file: Path) -> None:
    """The index lists a tensor that its file lacks."""
    listed(random.choice(weights(file.parent)), NAMES[number])


def same_index(random: Random, number: int, file: Path) -> None:
    """Indices that say the same, in other words and through other files."""
    index = json.loads(file.read_text())
    second = weights(file.parent)[1]
    if number == 0:
        index = {"weight_map": dict(reversed(index["weight_map"].items())), "x": [1.5, None]}
    elif number == 1:
        (file.parent / f"{STEM}.safetensors").write_bytes(second.read_bytes())
    else:
        there = ("copy.safetensors", f"sub/{second.name}", f"./{second.name}", "a file")[number - 2]
        (file.parent / there).parent.mkdir(exist_ok=True)
        (file.parent / there).write_bytes(second.read_bytes())
        places = index["weight_map"].items()
        index["weight_map"] = {name: there if place == second.name else place for name, place in places}
    file.write_text(json.dumps(index, indent=number))


def config_number(random: Random, number: int, file: Path) -> None:
    config = json.loads(file.read_text())
    config[random.choice(("width", "hidden"))] = "@@"
    file.write_text(with_token(config, NUMBERS[number].format()))


def config_key(random: Random, number: int, file: Path) -> None:
    key, token = PAIRS[number]
    file.write_text(with_token(json.loads(file.read_text()) | {key: "@@"}, token.format()))


def same_config(random: Random, number: int, file: Path) -> None:
    config = json.loads(file.read_text())
    configs = ({}, {"width": 6}, config | {"unknown": {"a": [None]}}, dict(reversed(config.items())))
    file.write_text(json.dumps(configs[number], indent=number))


def another_kind(random: Random, number: int, folder: Path) -> None:
    """Another dtype of eight bytes for the integers."""
    for file in weights(folder):
        header, data = parts(file)
        if "steps" in header:
            header["steps"]["dtype"] = ("U64", "F64", "C64")[number]
            write(file, header, data)


def rename(random: Random, number: int, folder: Path) -> None:
    """A tensor under a name that the model does not have, in the index too."""
    file = random.choice(weights(folder))
    header, data = parts(file)
    old = random.choice(tensors(header))
    write(file, renamed(header, old, NAMES[number]), data)
    listed(file, NAMES[number], old)


def tied(random: Random, number: int, folder: Path) -> None:
    """A tied parameter under its other name."""
    old, new = (("embed.weight", "head.weight"), ("shift", "same_shift"))[number]
    for file in weights(folder):
        header, data = parts(file)
        if old in header:
            write(file, renamed(header, old, new), data)
            listed(file, new, old)


def add(is_listed: bool, random: Random, number: int, folder: Path) -> None:
    """A tensor more, in the index too or not."""
    file = random.choice(weights(folder))
    header, data = parts(file)
    dtype, count, nbytes = (("F32", 3, 12), ("U8", 0, 0), ("F4", 8, 4), ("F8_E8M0", 4, 4), ("BOOL", 2, 2))[number]
    header["more"] = {"dtype": dtype, "shape": [count], "data_offsets": [len(data), len(data) + nbytes]}
    write(file, header, data + random.randbytes(nbytes))
    if is_listed:
        listed(file, "more")


CONTENTS = {
    "another index": Kind("index", partial(text, TEXTS + MAPS), len(TEXTS + MAPS), "refused"),
    "an index in another encoding": Kind("index", encode, 8),
    "another file in the index": Kind("index", place, len(PLACES), "refused"),
    "a tensor not in the index": Kind("index", unlist, 4, "refused"),
    "a tensor only in the index": Kind("index", list_more, len(NAMES), "refused"),
    "an index in other words": Kind("index", same_index, 6, "loads"),
    "another config": Kind("config", partial(text, TEXTS), len(TEXTS), "refused"),
    "a config in another encoding": Kind("config", encode, 8),
    "another number in the config": Kind("config", config_number, len(NUMBERS), "refused"),
    "another key in the config": Kind("config", config_key, len(PAIRS)),
    "a config in other words": Kind("config", same_config, 4, "loads"),
    "integers of another dtype": Kind("folder", another_kind, 3),
    "a tensor renamed": Kind("folder", rename, len(NAMES), "refused"),
    "a tied name": Kind("folder", tied, 2, "loads"),
    "a tensor more": Kind("folder", partial(add, True), 5, "refused"),
    "a tensor more that no index lists": Kind("folder", partial(add, False), 5),
}
