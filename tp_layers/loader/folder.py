"""Where a checkpoint is: a local folder or a repository of the hub, and the config in it."""

import json
from pathlib import Path
from typing import Any

from .index import STEMS

QUANTISED = "quantised weights are packed in a layout that cannot be sliced; load the model unquantised"


def find_folder(path: str | Path, subfolder: str | None) -> Path:
    """The local folder of a model; a repository id is resolved by huggingface_hub, offline from its cache."""
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists() or str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
            raise FileNotFoundError(f"{path} is neither a folder nor the id of a repository")
        try:
            from huggingface_hub import snapshot_download
        except ImportError as error:
            raise FileNotFoundError(f"{path} is not a folder; repository ids need huggingface_hub") from error
        inside = f"{subfolder}/" if subfolder else ""
        # A pattern's `*` stands for slashes too: as a prefix it would fetch every component of a pipeline.
        ends = (".safetensors", ".safetensors.index.json", "-?????-of-?????.safetensors")
        names = ["config.json", *(stem + end for stem in STEMS for end in ends)]
        folder = Path(snapshot_download(str(path), allow_patterns=[inside + name for name in names]))
    folder = folder / subfolder if subfolder else folder
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    return folder


def read_config(folder: Path) -> dict[str, Any]:
    """The model's `config.json`.

    Raises:
        FileNotFoundError: there is none. ValueError: it is not JSON, or describes a quantised checkpoint.
    """
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json: is the model in a subfolder of it?")
    try:
        config = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not the config of a model: it holds a {type(config).__name__}")
    if config.get("quantization_config") is not None:
        raise ValueError(f"{file} has a quantization_config: {QUANTISED}")
    return config
