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
from pathlib import Path

import torch

from .target import weight_files
from .unfinished import Unfinished, new_token, remove_unfinished
from .write import Stored, TensorFile, sync_folder, write_bytes


class Writer:
    """Writes the files of one save, whose names begin with `stem`, and puts them in place with the `configs`."""

    def __init__(self, folder: Path, stem: str, files: list[list[Stored]], configs: dict[str, bytes]) -> None:
        self.folder, self.files, self.configs = folder, files, configs
        self._stem, self._index = stem, f"{stem}.safetensors.index.json"
        self._token, self._infix = new_token(), ""
        self._unfinished = Unfinished(folder, self._token)
        self._file: TensorFile | None = None
        self._number, self._index_bytes = -1, b""

    def start(self) -> None:
        """Makes the folders."""
        self._unfinished.make()
        if weight_files(self.folder, self._stem):
            self._infix = f"-{self._token}"

    def write(self, number: int, full: torch.Tensor) -> None:
        """Appends `full` to file `number`, as the next of its tensors."""
        if number != self._number:
            self._close()
            self._file = TensorFile(self._unfinished.path / self.name(number), self.files[number], {"format": "pt"})
            self._number = number
        assert self._file is not None
        self._file.append(full)

    def finish(self) -> None:
        """Makes the new checkpoint the one that is read; nothing has changed for readers if this fails."""
        self._close()
        names = [self.name(number) for number in range(len(self.files))]
        several = len(names) > 1
        if several:
            self._index_bytes = self._index_of(names)
        for name, data in {**self.configs, **({self._index: self._index_bytes} if several else {})}.items():
            write_bytes(self._unfinished.path / name, data)
        for name in [*(names if several else []), *self.configs]:
            self._unfinished.move(name)
        sync_folder(self.folder)
        self._unfinished.move(self._index if several else names[0])
        if not several and (self.folder / self._index).exists():
            sync_folder(self.folder)
            (self.folder / self._index).unlink()
        self._unfinished.keep()

    def discard(self) -> None:
        """Removes what has been written, unless it is in use by now."""
        if self._file is not None:
            self._file.abandon()
        self._unfinished.discard()

    def clean(self) -> None:
        """Removes the files of earlier checkpoints, and what saves that were killed have left.

        Neither if another save has put its own in place meanwhile, as it can on a file system without locks: nothing
        of it may be removed.
        """
        sync_folder(self.folder)
        names = {self.name(number) for number in range(len(self.files))}
        index = self.folder / self._index
        if index.exists() != (len(names) > 1) or (index.exists() and index.read_bytes() != self._index_bytes):
            self._unfinished.discard()
            return
        if len(names) > 1:
            names.add(self._index)
        for name in weight_files(self.folder, self._stem):
            if name not in names:
                (self.folder / name).unlink()
        remove_unfinished(self.folder)

    def name(self, number: int) -> str:
        """The name of file `number`."""
        several = f"{self._infix}-{number + 1:05d}-of-{len(self.files):05d}" if len(self.files) > 1 else ""
        return f"{self._stem}{several}.safetensors"

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _index_of(self, names: list[str]) -> bytes:
        weight_map = {item.name: name for name, file in zip(names, self.files, strict=True) for item in file}
        total = sum(item.nbytes for file in self.files for item in file)
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
        return (text + "\n").encode()
