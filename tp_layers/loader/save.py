"""`save`: an ordinary, full checkpoint from a sharded model, one full parameter at a time."""

import json
import os
import re
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from ..collectives import broadcast_text, receive, send
from ..group import Group
from ..plans.shard import Sharding, sharding_of
from ..plans.spec import ShardSpec
from .index import DTYPES

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class _Stored:
    """One tensor of the checkpoint: its name, and its full shape and dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    spec: ShardSpec | None

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def save(model: nn.Module, path: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Writes the full model to `path`, as `save_pretrained` would have before it was sharded. All ranks call it.

    The group's rank 0 writes, and holds one full parameter and one shard at a time; it takes the shards of the others
    one by one. The files get their names only once all of them are complete.

    Args:
        model: sharded by `apply` or `load`.
        path: a folder, made if needed, on rank 0's machine.
        max_shard_size: bytes of tensors a file holds at most, a number or as in "5GB"; a larger one has its own file.

    Raises:
        ValueError: the model is not sharded by this package, a dtype cannot be stored, or the size is not one.
        OSError: rank 0 cannot write; raised on every rank, and a checkpoint that was there is as it was.
    """
    sharding = sharding_of(model)
    if sharding is None:
        raise ValueError(f"this {type(model).__name__} is not sharded by tp_layers: use its own save_pretrained")
    limit = parse_size(max_shard_size)
    group, folder = sharding.group, Path(path)
    files = _plan_files(_stored(model, sharding), limit)
    problem = ""
    writer = _Writer(model, folder, files) if group.rank == 0 else None
    state = model.state_dict()
    for number, stored in enumerate(files):
        for item in stored:
            full = _gather(state[item.name], item, group)
            if writer is not None and not problem:
                # The others are sending: after a failure their shards are taken to the end, and all ranks raise.
                problem = _attempt(folder, writer.write, number, item, full)
            # Freed before the next one is put together.
            del full
    if writer is not None:
        problem = problem or _attempt(folder, writer.finish)
        if problem:
            writer.discard()
    problem = broadcast_text(problem, group)
    if problem:
        raise OSError(problem)


def parse_size(size: int | str) -> int:
    """Bytes, from a number or a text such as "5GB", "500MB" or "2GiB".

    Raises:
        ValueError: it is neither, or not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", str(size).upper())
    number = size if isinstance(size, int) else int(float(found[1]) * UNITS[found[2]]) if found else 0
    if number < 1:
        raise ValueError(f"max_shard_size must be a number of bytes, or such as '5GB', got {size!r}")
    return number


def _stored(model: nn.Module, sharding: Sharding) -> list[_Stored]:
    seen: set[int] = set()
    found = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Tied parameters are one tensor, and have one entry in the file.
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.dtype not in NAMES:
            raise ValueError(f"'{name}' is {tensor.dtype}, which safetensors files cannot hold")
        spec = sharding.resolved.specs.get(name)
        shape = tuple(tensor.shape) if spec is None else spec.full_shape(tensor.shape)
        found.append(_Stored(name, shape, tensor.dtype, spec))
    return found


def _plan_files(stored: list[_Stored], limit: int) -> list[list[_Stored]]:
    files: list[list[_Stored]] = [[]]
    for item in stored:
        if files[-1] and sum(other.nbytes for other in files[-1]) + item.nbytes > limit:
            files.append([])
        files[-1].append(item)
    # Wider dtypes first, so that each tensor starts at a multiple of its element's size.
    return [sorted(file, key=lambda item: -item.dtype.itemsize) for file in files]


def _gather(own: torch.Tensor, item: _Stored, group: Group) -> torch.Tensor | None:
    """The full tensor on rank 0's CPU, None on the others."""
    if item.spec is None:
        return own.cpu() if group.rank == 0 else None
    if group.rank != 0:
        send(own, group, 0)
        return None
    full = torch.empty(item.shape, dtype=item.dtype)
    item.spec.put(own, full, 0, group.size)
    for rank in range(1, group.size):
        item.spec.put(receive(torch.empty_like(own), group, rank), full, rank, group.size)
    return full


def _attempt(folder: Path, action: Callable[..., None], *args: Any) -> str:
    """Does it, and returns what went wrong, if anything. Whatever that is, the other ranks must hear of it."""
    try:
        action(*args)
    except Exception as error:
        return f"cannot write the checkpoint to {folder}: {error}"
    return ""


class _Writer:
    """Writes a checkpoint into a folder of its own inside the final one, and moves its files when all are complete."""

    def __init__(self, model: nn.Module, folder: Path, files: list[list[_Stored]]) -> None:
        self.model, self.folder, self.files = model, folder, files
        self.stem = "diffusion_pytorch_model" if hasattr(model, "save_config") else "model"
        self.unfinished = folder / f".{uuid.uuid4().hex[:12]}.tmp"
        self._stream: IO[bytes] | None = None
        self._number = -1

    def write(self, number: int, item: _Stored, full: torch.Tensor | None) -> None:
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
