"""Where a checkpoint is: a local folder or a repository of the hub, and the config in it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .hub import NONE, download

QUANTISED = "quantised weights are packed in a layout that cannot be sliced; load the model unquantised"


def find_folder(
    path: str | Path,
    subfolder: str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    options: Mapping[str, Any] = NONE,
) -> Path:
    """The local folder of a model: `path` or a subfolder of it, or that of a repository whose id `path` is.

    Of a repository, the files of that `revision` (a branch, a tag or a commit) and `variant` are downloaded, with these
    `options` of the hub's client.

    Raises:
        FileNotFoundError: there is no such folder or repository, or not these files in it.
        OSError: the repository may not be read, or cannot be reached.
        ValueError: a revision of a folder.
    """
    folder = Path(path)
    if not folder.is_dir():
        if folder.exists() or str(path).count("/") != 1 or str(path).startswith((".", "/", "~")):
            raise FileNotFoundError(f"{path} is neither a folder nor the id of a repository")
        try:
            return download(str(path), subfolder, variant, revision, options)
        except ImportError as error:
            raise FileNotFoundError(f"{path} is not a folder; repository ids need huggingface_hub") from error
    if revision is not None:
        raise ValueError(f"revision={revision!r} is for the id of a repository; {path} is a folder")
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
        config = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not the config of a model: it holds a {type(config).__name__}")
    if config.get("quantization_config") is not None:
        raise ValueError(f"{file} has a quantization_config: {QUANTISED}")
    return config


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Within it, a ValueError says which checkpoint it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
