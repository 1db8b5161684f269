"""What safetensors reads of a checkpoint, the shards of it that a model must hold, and a limit of time."""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

import tp_layers
from index_files import STEM
from pretrained import attributes
from toy import Toy
from tp_layers.group import Group
from tp_layers.plans.resolve import resolve

INDEX = f"{STEM}.safetensors.index.json"
State = dict[str, torch.Tensor]


class Slow(BaseException):
    """Too slow. TimeoutError is an OSError, which `load` may raise."""


@contextmanager
def limited(seconds: float, folder: Path) -> Iterator[None]:
    """Ends what runs within after so many seconds."""

    def expire(*args: object) -> None:
        raise Slow(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    # Outside of Python no signal ends the wait for a pipe's writer: this writer does.
    writer = f'sleep {seconds + 1}; : <> "$0"'
    writers = [subprocess.Popen(["sh", "-c", writer, file]) for file in folder.iterdir() if file.is_fifo()]
    try:
        yield
    finally:
        for process in writers:
            process.kill()
            process.wait()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def plan(resolved: Callable[[], object]) -> dict[str, object]:
    """A packed pair. `resolved` is called when the plan is: after the headers were read, before any tensor."""

    def blocks(linear: nn.Linear) -> list[int]:
        resolved()
        return [3, 1]

    return {"up": tp_layers.PackedColwiseParallel(blocks), "down": tp_layers.PackedRowwiseParallel([3, 1])}


@cache
def specs(size: int) -> dict:
    return resolve(Toy(), plan(lambda: None), size).specs


def regular(file: Path) -> Path:
    # To open a pipe would be to wait for its writer.
    if not file.is_file():
        raise FileNotFoundError(file)
    return file


def read(folder: Path) -> State:
    """What safetensors reads of the tensors that the index, or the only file, names. Raises whatever it raises."""
    single, index, files = folder / f"{STEM}.safetensors", folder / INDEX, {}
    places = json.loads(regular(index).read_bytes())["weight_map"] if os.path.lexists(index) else None
    for file in {folder / name for name in places.values()} if places is not None else {single}:
        with safe_open(regular(file), framework="pt") as opened:
            files[file] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return files[single] if places is None else {name: files[folder / place][name] for name, place in places.items()}


def read_or_none(folder: Path) -> State | None:
    try:
        return read(folder)
    except Exception:
        return None


def same(got: torch.Tensor, wanted: torch.Tensor, is_cast: bool) -> bool:
    """The same bits; of a cast NaN the bits depend on the instructions of the CPU."""
    if got.dtype != wanted.dtype or got.shape != wanted.shape or got.is_meta:
        return False
    raw = got.detach().contiguous().flatten().view(torch.uint8), wanted.contiguous().flatten().view(torch.uint8)
    if not is_cast:
        return torch.equal(*raw)
    width = wanted.element_size()
    equal = (raw[0].view(-1, width) == raw[1].view(-1, width)).all(dim=1)
    return bool((equal | (got.isnan() & wanted.isnan()).flatten()).all())


def differing(model: nn.Module, state: State, group: Group, dtype: torch.dtype | None) -> list[str]:
    """The model's tensors that are not this rank's shard of those in `state`, a tied one under any of its names."""
    own, names = model.state_dict(keep_vars=True), {}
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    wrong = []
    for together in names.values():
        stored = [name for name in together if name in state]
        wrong += [] if stored else together
        for name in stored:
            spec, full = specs(group.size).get(name), state[name]
            shard = full if spec is None else spec.take(full, group.rank, group.size)
            is_cast = dtype is not None and full.is_floating_point()
            wrong += [] if same(own[name], shard.to(dtype) if is_cast else shard, is_cast) else [name]
    return wrong + [name for name, tensor in attributes(model).items() if tensor.is_meta]
