"""Ways to make a save fail on one rank, and what it must leave as it was."""

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tp_layers.loader import write

# Does to a rank, or to its model, what makes its save fail.
Spoil = Callable[[pytest.MonkeyPatch, nn.Module], None]


class FullDisk(io.FileIO):
    """A file on a disk with room for `left` bytes in all."""

    left = 0

    def write(self, data: Any) -> int:
        """Takes the data while there is room."""
        if len(data) > FullDisk.left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        FullDisk.left -= len(data)
        return super().write(data)


def full_disk(left: int) -> Spoil:
    def spoil(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
        FullDisk.left = left
        # As open() does: a buffer before the file, which writes the rest when it is closed.
        patch.setattr(write, "open", lambda path, mode: io.BufferedWriter(FullDisk(path, mode)), raising=False)

    return spoil


def failing(owner: Any, what: str, error: Exception, when: Callable[..., bool] = lambda *args: True) -> Spoil:
    """`owner.what` (None: of the model) raises when it is called with arguments that `when` picks."""

    def spoil(patch: pytest.MonkeyPatch, model: nn.Module) -> None:
        function = getattr(owner or model, what)

        def call(*args: Any, **kwargs: Any) -> Any:
            if when(*args):
                raise error
            return function(*args, **kwargs)

        patch.setattr(owner or model, what, call)

    return spoil


def cannot(owner: Any, what: str, when: Callable[..., bool] = lambda *args: True) -> Spoil:
    return failing(owner, what, PermissionError("not yours"), when)


NO_MEMORY = RuntimeError("out of memory")


def contents(folder: Path) -> dict[str, Any]:
    """The files of a folder; of a config, what makes the model."""
    found: dict[str, Any] = {file.name: file.read_bytes() for file in folder.iterdir()}
    if "config.json" in found:
        config = json.loads(found["config.json"])
        found["config.json"] = {key: value for key, value in config.items() if key != "_name_or_path"}
    return found
