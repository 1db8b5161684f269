"""Seeded changes to the headers of safetensors files that leave them JSON, or nearly."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from mutate import Kind

DEEP = 100_000
# What a number, a text or a list may be mistaken for. As the tokens below they are templates: {{}} is {}.
WRONG = ("null", "true", "1.5", "-1", "[]", "{{}}", '""', "NaN", "1e400", "[[7]]", "18446744073709551616", "9" * 5000)
# A tensor's first offset {a} and last {b}.
OFFSETS = (
    *WRONG, "[{b}, {a}]", "[-1, {b}]", "[{a}.0, {b}]", "[{a}, {b}.5]", "[{a}, 1e400]", "[{a}, 1e2]", "[true, {b}]",
    '["{a}", "{b}"]', "[{a}]", "[{a}, {b}, {b}]", "[{a}, NaN]", "[{a}, -{b}]", "[{a}, 0{b}]", "[{a}, [{b}]]",
    "[-0, {b}]", "[{a}, 18446744073709551615]", "[{a}, 18446744073709551616]", "[null, {b}]", "[{b}, {b}]",
    "[9223372036854775807, 9223372036854775808]", '{{"start": {a}, "end": {b}}}', "[{a}, {more}]", "[{a}, {less}]",
)  # fmt: skip
# Its {shape} without the brackets.
EXTENTS = (
    *WRONG, "[{shape}, 1]", "[1, {shape}]", "[0]", "[{shape}, 0]", "[{shape}.0]", "[-{shape}]", '"{shape}"', "[true]",
    "[{reversed}]", "[{count}]", "[4294967296, 4294967296]", "[18446744073709551616]", "[{shape}, null]",
    "[[{shape}]]", "[{shape}, 18446744073709551615]", "[9223372036854775808, 2]", "[1e1, {shape}]",
)  # fmt: skip
DTYPES = (
    *WRONG, '"Q4"', '"f32"', '"F32 "', '"F16"', '"F64"', '"I32"', '"U32"', '"BOOL"', '"F8_E4M3"', '"F4"', '"F8_E8M0"',
    '"F6_E2M3"', '"C64"', '"F32\\u0000"', '["F32"]', '{{"Q4": null}}', '{{"F32": 1}}', '"float32"', '"torch.float32"',
)  # fmt: skip
TEXTS = (
    "", "{", "[]", "null", "1", "{}", "{1: 2}", "{null: 2}", '{"a": 1}', '{"a": []}', '{"a": {}}', "NaN",
    "[" * DEEP, '{"a":' * DEEP, '{"a":' + "[" * DEEP + "]" * DEEP + "}", '{"__metadata__": 1}',
    '{"__metadata__": {"a": 1}}', '{"__metadata__": {"a": {"b": "c"}}}', '{"__metadata__": {}}',
)  # fmt: skip


def parts(file: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    data = file.read_bytes()
    stop = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:stop]), data[stop:]


def write(file: Path, header: bytes | str | dict[str, Any], data: bytes) -> None:
    header = json.dumps(header) if isinstance(header, dict) else header
    text = header.encode() if isinstance(header, str) else header
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)


def tensors(header: dict[str, Any], dims: int = 0) -> list[str]:
    """The names of a header's tensors of at least `dims` dims, in the order of their bytes."""
    found = [name for name in header if name != "__metadata__" and len(header[name]["shape"]) >= dims]
    return sorted(found, key=lambda name: header[name]["data_offsets"])


def with_token(content: dict[str, Any], token: str) -> str:
    """The JSON text of `content`, in which the string "@@" becomes any text at all."""
    return json.dumps(content).replace('"@@"', token, 1)


def renamed(header: dict[str, Any], old: str, new: str) -> dict[str, Any]:
    return {new if name == old else name: info for name, info in header.items()}


def _field(key: str, tokens: tuple[str, ...]) -> Kind:
    """Another text for one field of a matrix."""

    def spoil(random: Random, number: int, file: Path) -> None:
        header, data = parts(file)
        info = header[random.choice(tensors(header, dims=2))]
        (a, b), shape = info["data_offsets"], info["shape"]
        words = dict(a=a, b=b, more=b + 1, less=b - 1, count=(b - a) // 4)
        words |= {"shape": str(shape)[1:-1], "reversed": str(shape[::-1])[1:-1]}
        info[key] = "@@"
        write(file, with_token(header, tokens[number].format(**words)), data)

    return Kind("weights", spoil, len(tokens), "refused")


def _text(change: Callable[[dict[str, Any]], tuple[bytes | str, ...]], count: int, outcome: str) -> Kind:
    """Other texts for the whole header, with the same data."""

    def spoil(random: Random, number: int, file: Path) -> None:
        header, data = parts(file)
        write(file, change(header)[number], data)

    return Kind("weights", spoil, count, outcome)


def _garbled(header: dict[str, Any]) -> tuple[bytes | str, ...]:
    text = json.dumps(header)
    return (
        "\ufeff" + text, text.encode("utf-16"), text.encode("utf-16-le"), text + "x", text + text, text + "\0",
        f"[{text}]", text[:-1] + ",}", text + "//", text.replace('"', "'"), text[:-1], text.replace(":", "=", 1),
        text.replace(".", "\\ud800.", 1), text.replace(".", "\t.", 1), text.encode().replace(b".", b"\xff.", 1),
        text[:-1] + ', "__metadata__": {}, "__metadata__": {}}', text[:-1] + ', "__metadata__": 1}',
        text.replace("}", ', "x": ' + "[" * DEEP + "]" * DEEP + "}", 1), text.replace("}", ', "x": 1e400}', 1),
        text.replace("}", ', "x": ' + "9" * 5000 + "}", 1), text.replace("}", ', "x": NaN}', 1),
    )  # fmt: skip


def _same(header: dict[str, Any]) -> tuple[str, ...]:
    """Texts that say the same."""
    bare = {name: info for name, info in header.items() if name != "__metadata__"}
    text = json.dumps(bare)
    return (
        " \n" + text,
        json.dumps(header, indent=4), text + " " * 5000, text + "\n\t\r ", text + " " * (len(text) % 2),
        text + " " * (1 - len(text) % 2), json.dumps(dict(reversed(header.items()))), text.replace("b", "\\u0062"),
        text, json.dumps({"__metadata__": {"note": "x" * 100_000}} | bare), json.dumps(bare | {"__metadata__": {}}),
        json.dumps({"__metadata__": None} | bare),
    )  # fmt: skip


def _strange(header: dict[str, Any]) -> tuple[str, ...]:
    """A tensor in words that safetensors takes, and another parser, or its caller, may not."""
    name = tensors(header, dims=2)[-1]
    dtype, shape, offsets = header[name].values()
    words = [f'["{dtype}", {shape}, {offsets}]']
    words += [f'{{"dtype": {{"{dtype}": null}}, "shape": {shape}, "data_offsets": {offsets}}}']
    more = ("null", "[" * 99 + "]" * 99, "9" * 300, '{"x": 1}', '"\\ud83d\\ude00"')
    words += [json.dumps(header[name])[:-1] + f', "x": {value}}}' for value in more]
    return tuple(with_token(header | {name: "@@"}, word) for word in words)


def _twice(header: dict[str, Any]) -> tuple[str, ...]:
    """A tensor that is listed twice, both alike or one of them wrong."""
    name = tensors(header, dims=2)[-1]
    info = header[name]
    _, stop = info["data_offsets"]
    other: list[Any] = [info, {**info, "shape": info["shape"][::-1]}, {**info, "data_offsets": [0, stop]}]
    other += [{**info, "dtype": "I32"}, {**info, "shape": [0], "data_offsets": [stop, stop]}, [], None]
    pairs = [(json.dumps(info), json.dumps(second)) for second in other]
    pairs += [pair[::-1] for pair in pairs]
    return tuple(with_token(header | {name: "@@"}, f'{first}, "{name}": {second}') for first, second in pairs)


def shift(random: Random, number: int, file: Path) -> None:
    """Tensors that overlap, or bytes between them that belong to none."""
    header, data = parts(file)
    names = tensors(header)
    at = random.randrange(1, len(names))
    before = header[names[at - 1]]["data_offsets"]
    step = (1, 4, 8, 4096, -1, -4, before[0] - before[1])[number]
    for name in names[at:]:
        header[name]["data_offsets"] = [offset + step for offset in header[name]["data_offsets"]]
    write(file, header, (data[: before[1]] + bytes(max(step, 0)) + data[before[1] - min(step, 0) :]))


def reorder(random: Random, number: int, file: Path) -> None:
    """The same tensors in another order of their bytes."""
    header, data = parts(file)
    moved, out = dict(header), b""
    for name in random.sample(tensors(header), len(tensors(header))):
        start, stop = header[name]["data_offsets"]
        moved[name] = {**header[name], "data_offsets": [len(out), len(out) + stop - start]}
        out += data[start:stop]
    write(file, moved, out)


def rename(random: Random, number: int, file: Path) -> None:
    header, data = parts(file)
    old = random.choice(tensors(header))
    write(file, renamed(header, old, f"{old}.x"), data)


def drop(random: Random, number: int, file: Path) -> None:
    """A tensor less, and its bytes."""
    header, data = parts(file)
    start, stop = header.pop(random.choice(tensors(header)))["data_offsets"]
    for name in tensors(header):
        offsets = header[name]["data_offsets"]
        header[name]["data_offsets"] = [at - (stop - start) * (at >= stop) for at in offsets]
    write(file, header, data[:start] + data[stop:])


def crowd(random: Random, number: int, file: Path) -> None:
    """Very many tensors without elements, one of them twice."""
    header, data = parts(file)
    at = [len(data), len(data)]
    text = json.dumps(header | {f"x.{one}": {"dtype": "U8", "shape": [0], "data_offsets": at} for one in range(30_000)})
    write(file, text.replace('"x.29999"', '"x.7"'), data)


HEADERS = {
    "very many tensors, one of them twice": Kind("weights", crowd, 1),
    "other offsets": _field("data_offsets", OFFSETS),
    "another shape": _field("shape", EXTENTS),
    "another dtype": _field("dtype", DTYPES),
    "another header": _text(lambda header: TEXTS, len(TEXTS), "refused"),
    "a garbled header": _text(_garbled, 21, "refused"),
    "a header in other words": _text(_same, 12, "loads"),
    "a header in strange words": _text(_strange, 7, "either"),
    "a tensor listed twice": _text(_twice, 14, "either"),
    "overlaps and holes": Kind("weights", shift, 7, "refused"),
    "another order of the bytes": Kind("weights", reorder, 6, "loads"),
    "a tensor renamed in its file": Kind("weights", rename, 6, "refused"),
    "a tensor dropped from its file": Kind("weights", drop, 6, "refused"),
}
