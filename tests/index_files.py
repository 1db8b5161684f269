"""Checkpoints in files and indices that are right, and safetensors files with any header at all."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

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
