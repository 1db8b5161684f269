"""The folder a model is saved to: what the model writes there, and what may be there already."""

import copy
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .architecture import difference
from .folder import read_config
from .layout import DIFFUSERS, STEMS, TRANSFORMERS
from .snapshot import MANIFEST

CONFIG = "config.json"


def stem_of(model: nn.Module) -> str:
    """How the names of the model's weight files begin: as diffusers' for its models, else as transformers'."""
    return DIFFUSERS if hasattr(model, "save_config") else TRANSFORMERS


def weight_files(folder: Path, stem: str) -> list[str]:
    """The weight files of `stem` and their index in `folder`, those that no index names too. No variant's."""
    # The eight digits are those of a save over another checkpoint.
    ours = re.compile(
        rf"{re.escape(stem)}((-[0-9a-f]{{8}})?-\d{{5}}-of-\d{{5}}\.safetensors|\.safetensors(\.index\.json)?)"
    )
    return sorted(file.name for file in folder.iterdir() if ours.fullmatch(file.name))


def config_files(model: nn.Module) -> dict[str, bytes]:
    """The files of the model's config, by name, as the model itself writes them; none if it has no config.

    Raises:
        ValueError: it cannot write them.
    """
    owner: Any = model
    with tempfile.TemporaryDirectory() as scratch:
        try:
            if hasattr(owner, "save_config"):
                owner.save_config(Path(scratch))
            elif hasattr(getattr(owner, "config", None), "save_pretrained"):
                _as_saved(owner).save_pretrained(Path(scratch))
                if getattr(owner, "generation_config", None) is not None:
                    owner.generation_config.save_pretrained(Path(scratch))
        except Exception as error:
            raise ValueError(f"the config of this {type(model).__name__} cannot be written: {error}") from error
        return {file.name: file.read_bytes() for file in sorted(Path(scratch).iterdir())}


def _as_saved(model: Any) -> Any:
    """A copy of the model's config with what transformers' `save_pretrained` notes in it before it writes it."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    if isinstance(getattr(model, "dtype", None), torch.dtype):
        config.dtype = str(model.dtype).removeprefix("torch.")
    return config


def check_target(model: nn.Module, folder: Path, configs: dict[str, bytes], *, sharded: bool) -> None:
    """What is in `folder` may be replaced by the model, as a snapshot if `sharded`, and its `configs`.

    Config and weights are two files, which cannot be replaced at one instant: in between, the old weights must be
    right under the new config.

    Raises:
        ValueError: there is another model's config, or something that is no config; weights that are read first; or a
            checkpoint of the other kind.
    """
    _check_weights(folder, stem_of(model), sharded)
    file = folder / CONFIG
    if not file.exists():
        return
    if CONFIG not in configs:
        raise ValueError(f"{file} is of another model, as this {type(model).__name__} has no config: {_ELSEWHERE}")
    if not file.is_file():
        raise ValueError(f"{file} is not a file: {_ELSEWHERE}")
    try:
        there = read_config(folder)
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}: {_ELSEWHERE}") from error
    # Of transformers' configs; its versions before 5 write the second.
    differing = difference(model, there, json.loads(configs[CONFIG]), notes=("dtype", "torch_dtype"))
    if differing:
        raise ValueError(f"{file} is of another model ({differing}): {_ELSEWHERE}")


def _check_weights(folder: Path, stem: str, sharded: bool) -> None:
    if not folder.is_dir():
        return
    if (folder / MANIFEST).exists() and not sharded:
        raise ValueError(f"{folder} has a sharded snapshot ({MANIFEST}): {_ELSEWHERE}")
    for other in STEMS if sharded else STEMS[: STEMS.index(stem)]:
        for found in weight_files(folder, other):
            what = "the weights of an ordinary checkpoint" if sharded else f"read instead of {stem}.safetensors"
            raise ValueError(f"{folder} has {found}, which is {what}: {_ELSEWHERE}")


_ELSEWHERE = "save to a folder of its own, or delete what is there first"
