"""Checkpoints of the tiny models, made once; what they hold, and loading and saving them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from safetensors.torch import load_file

import tp_layers
from families import FAMILIES
from toy import Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.index import read_index

CLASSES: dict[str, Any] = {"Toy": Toy, **{name: getattr(diffusers, name) for name in FAMILIES}}


def several_files(factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the folder of a tiny model in several files (a `Toy` in one, without its float64), made once."""

    def save(name: str, dtype: torch.dtype, folder: Path) -> None:
        if name == "Toy":
            save_toy(folder, dtype)
        else:
            FAMILIES[name].build(dtype=dtype).save_pretrained(folder, max_shard_size="100KB")

    return _made_once(factory, save)


def one_file(factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Gives the folder of a tiny model in one file, made once. A `Toy` in float32 has its float64 too."""

    def save(name: str, dtype: torch.dtype, folder: Path) -> None:
        if name == "Toy":
            save_toy(folder, dtype if dtype is torch.bfloat16 else None)
        else:
            FAMILIES[name].build(dtype=dtype).save_pretrained(folder)

    return _made_once(factory, save)


def _made_once(factory: pytest.TempPathFactory, save: Callable[[str, torch.dtype, Path], None]) -> Callable[..., Path]:
    made: dict[tuple[str, torch.dtype], Path] = {}

    def folder(name: str, dtype: torch.dtype = torch.float32) -> Path:
        if (name, dtype) not in made:
            made[name, dtype] = factory.mktemp(name)
            save(name, dtype, made[name, dtype])
        return made[name, dtype]

    return folder


def state_of(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def identical(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    """The same names, dtypes, shapes and bits."""
    return got.keys() == wanted.keys() and all(
        got[name].dtype == tensor.dtype and got[name].shape == tensor.shape and torch.equal(got[name], tensor)
        for name, tensor in wanted.items()
    )


def names(folder: Path) -> list[str]:
    """The files of a folder, in order."""
    return sorted(file.name for file in folder.iterdir())


def resave(group: Group, name: str, folder: Path, targets: dict[Path, int | str], plan: dict[str, Any] | None) -> None:
    """Loads a checkpoint over `group` and saves it to each target with its `max_shard_size`."""
    model = tp_layers.load(CLASSES[name], folder, group=group, plan=plan)
    for target, limit in targets.items():
        tp_layers.save(model, target, max_shard_size=limit)
        # Every rank returns once the checkpoint is there.
        read_index(target)
