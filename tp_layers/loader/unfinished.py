"""Files of one save on their way into its folder."""

import os
import re
import shutil
import uuid
from pathlib import Path

LEFT_OVER = re.compile(r"\.tp_layers-[0-9a-f]{8}\.tmp")


def new_token() -> str:
    """Eight hexadecimal digits that no other save has."""
    return uuid.uuid4().hex[:8]


class Unfinished:
    """A hidden folder at `path` inside the final `folder`, whose complete files are moved out one by one."""

    def __init__(self, folder: Path, token: str) -> None:
        self.folder, self.path = folder, folder / f".tp_layers-{token}.tmp"
        self._added: list[Path] = []

    def make(self) -> None:
        """Makes both folders."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.mkdir()

    def move(self, name: str) -> None:
        """Gives a file its final name, and takes the place of one that has it."""
        target = self.folder / name
        added = not target.exists()
        os.replace(self.path / name, target)
        if added:
            self._added.append(target)

    def keep(self) -> None:
        """What has been moved stays, whatever comes."""
        self._added = []

    def discard(self) -> None:
        """Removes the hidden folder, and what was moved out of it and replaced nothing."""
        for file in self._added:
            file.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)


def remove_unfinished(folder: Path) -> None:
    """Removes what saves to `folder` have not moved, this one's hidden folder and those of saves that were killed."""
    for path in folder.iterdir():
        if LEFT_OVER.fullmatch(path.name):
            shutil.rmtree(path)
