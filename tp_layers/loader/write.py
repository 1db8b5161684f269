"""The files of a checkpoint, which get their names only once all of them are complete."""

import json
import os
import re
import shutil
import uuid
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from ..plans.spec import ShardSpec
from .index import DTYPES

NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Stored:
    """One tensor of the checkpoint: its name, and its full shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: ShardSpec | None

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Writer:
    """Writes a checkpoint into a folder of its own inside the final one, and moves its files when all are complete."""

    def __init__(self, model: nn.Module, folder: Path, files: list[list[Stored]]) -> None:
        self.model, self.folder, self.files = model, folder, files
        self.stem = "diffusion_pytorch_model" if hasattr(model, "save_config") else "model"
        self.unfinished = folder / f".{uuid.uuid4().hex[:12]}.tmp"
        self._stream: IO[bytes] | None = None
        self._number = -1

    def write(self, number: int, item: Stored, full: torch.Tensor | None) -> None:
        """Appends `full` to file `number`."""
        if number != self._number:
            self._start(number)
        assert self._stream is not None and full is not None
        self._stream.write(full.contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(self) -> None:
        """Adds the index and the config, puts all files in place, and removes those of an earlier checkpoint."""
        self._close()
        self._write_index()
        self._write_config()
        # Weights first: an old index still finds its own files then.
        made = sorted(self.unfinished.iterdir(), key=lambda file: file.suffix != ".safetensors")
        for file in made:
            os.replace(file, self.folder / file.name)
        self.unfinished.rmdir()
        ours = re.compile(rf"{self.stem}(-\d{{5}}-of-\d{{5}})?\.safetensors(\.index\.json)?")
        for file in self.folder.iterdir():
            if ours.fullmatch(file.name) and file.name not in {new.name for new in made}:
                file.unlink()

    def discard(self) -> None:
        """Removes what is not complete."""
        if self._stream is not None:
            # On a full disk closing fails too, as it writes what is buffered.
            with suppress(OSError):
                self._stream.close()
        shutil.rmtree(self.unfinished, ignore_errors=True)

    def name(self, number: int) -> str:
        """The name of file `number`."""
        several = f"-{number + 1:05d}-of-{len(self.files):05d}" if len(self.files) > 1 else ""
        return f"{self.stem}{several}.safetensors"

    def _start(self, number: int) -> None:
        self._close()
        self.unfinished.mkdir(parents=True, exist_ok=True)
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for item in self.files[number]:
            offsets = [offset, offset + item.nbytes]
            header[item.name] = {"dtype": NAMES[item.dtype], "shape": list(item.shape), "data_offsets": offsets}
            offset += item.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._stream = open(self.unfinished / self.name(number), "wb")  # noqa: SIM115
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._number = number

    def _close(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None

    def _write_index(self) -> None:
        if len(self.files) > 1:
            weight_map = {item.name: self.name(number) for number, file in enumerate(self.files) for item in file}
            total = sum(item.nbytes for file in self.files for item in file)
            text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2, sort_keys=True)
            (self.unfinished / f"{self.stem}.safetensors.index.json").write_text(text + "\n")

    def _write_config(self) -> None:
        model: Any = self.model
        if hasattr(model, "save_config"):
            model.save_config(self.unfinished)
        elif hasattr(getattr(model, "config", None), "save_pretrained"):
            model.config.save_pretrained(self.unfinished)
