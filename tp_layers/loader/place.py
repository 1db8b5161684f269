"""An ordinary checkpoint put into its folder, so that a save that ends at any moment leaves the old one or the new one.

Tensor files are complete and on the disk before they get names that no file of the folder has. One step then makes the
new checkpoint the one that is read, as readers take an index before a single file:

    old       new       the step
    any       several   the new index replaces the old one, or is the first
    single    single    the new file replaces the old one
    several   single    the new file is moved in, and the old index removed

What nobody reads any more is removed last. transformers takes a single file before an index: for it the step is another
one of these moves, and what it reads is whole as well.
"""

import json
import os
import re
import shutil
import uuid
from pathlib import Path

import torch

from .target import weight_files
from .write import Stored, TensorFile, sync_folder, write_bytes

UNFINISHED = re.compile(r"\.tp_layers-[0-9a-f]{8}\.tmp")


class Writer:
    """Writes the files of one save into a hidden folder inside the final one, and puts them in place."""

    def __init__(self, folder: Path, stem: str, files: list[list[Stored]], configs: dict[str, bytes]) -> None:
        self.folder, self.stem, self.files, self.configs = folder, stem, files, configs
        self._token = uuid.uuid4().hex[:8]
        self._infix = ""
        self._unfinished = folder / f".tp_layers-{self._token}.tmp"
        self._file: TensorFile | None = None
        self._number = -1
        self._moved: list[Path] = []

    def start(self) -> None:
        """Makes the folders."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if weight_files(self.folder, self.stem):
            self._infix = f"-{self._token}"
        self._unfinished.mkdir()

    def write(self, number: int, full: torch.Tensor) -> None:
        """Appends `full` to file `number`, as the next of its tensors."""
        if number != self._number:
            self._close()
            self._file = TensorFile(self._unfinished / self.name(number), self.files[number], {"format": "pt"})
            self._number = number
        assert self._file is not None
        self._file.append(full)

    def finish(self) -> None:
        """Makes the new checkpoint the one that is read; nothing has changed for readers if this fails."""
        self._close()
        index, single = f"{self.stem}.safetensors.index.json", f"{self.stem}.safetensors"
        several = len(self.files) > 1
        if several:
            write_bytes(self._unfinished / index, self._index())
        for name, data in self.configs.items():
            write_bytes(self._unfinished / name, data)
        for name in [*(self.name(number) for number in range(len(self.files)) if several), *self.configs]:
            self._move(name)
        sync_folder(self.folder)
        self._move(index if several else single)
        if not several and (self.folder / index).exists():
            sync_folder(self.folder)
            (self.folder / index).unlink()
        self._moved = []

    def discard(self) -> None:
        """Removes what has been written, unless it is in use by now."""
        if self._file is not None:
            self._file.abandon()
        for file in self._moved:
            file.unlink(missing_ok=True)
        shutil.rmtree(self._unfinished, ignore_errors=True)

    def clean(self) -> None:
        """Removes the files of earlier checkpoints, and what saves that were killed have left."""
        sync_folder(self.folder)
        names = {self.name(number) for number in range(len(self.files))}
        if len(self.files) > 1:
            names.add(f"{self.stem}.safetensors.index.json")
        for name in weight_files(self.folder, self.stem):
            if name not in names:
                (self.folder / name).unlink()
        remove_unfinished(self.folder)

    def name(self, number: int) -> str:
        """The name of file `number`."""
        several = f"{self._infix}-{number + 1:05d}-of-{len(self.files):05d}" if len(self.files) > 1 else ""
        return f"{self.stem}{several}.safetensors"

    def _move(self, name: str) -> None:
        target = self.folder / name
        new = not target.exists()
        os.replace(self._unfinished / name, target)
        if new:
            self._moved.append(target)

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _index(self) -> bytes:
        weight_map = {item.name: self.name(number) for number, file in enumerate(self.files) for item in file}
        total = sum(item.nbytes for file in self.files for item in file)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        return (text + "\n").encode()


def remove_unfinished(folder: Path) -> None:
    """Removes the hidden folders of saves to `folder`."""
    for path in folder.iterdir():
        if UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path)
