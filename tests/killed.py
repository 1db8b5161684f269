"""The changes that a save makes to the disk: what they are, and a process that is killed before any one of them."""

import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from close import randomise
from forked import forked
from toy import PLAN, Toy
from tp_layers.apply import apply
from tp_layers.group import Group
from tp_layers.loader.save import save
from tp_layers.loader.write import TensorFile

CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir")


def sharded_toy(seed: int, group: Group | None = None) -> Toy:
    """A `Toy` with the weights of `seed`, sharded over `group` (default: one rank)."""
    return apply(randomise(Toy(), seed), PLAN, group=group or Group())


def held(seed: int) -> dict[str, torch.Tensor]:
    """What a checkpoint of `sharded_toy(seed)` holds."""
    state = sharded_toy(seed).state_dict()
    return {name: tensor for name, tensor in state.items() if name not in ("head.weight", "same_shift")}


def _die_before(step: int, folder: Path) -> None:
    """Ends this process, as a kill would, before change number `step` to the disk, the first being to `folder`."""
    seen = 0

    def count() -> None:
        nonlocal seen
        if seen == step:
            os.kill(os.getpid(), signal.SIGKILL)
        seen += 1

    def watch(event: str, args: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if (writes or event in CHANGES) and (seen or str(args[0]).startswith(str(folder))):
            count()

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            count()
            return function(*args)

        return call

    os.fsync = counted(os.fsync)
    TensorFile.append = counted(TensorFile.append)  # type: ignore[method-assign]
    sys.addaudithook(watch)


def _save_and_die(rank: int, size: int, step: int, seed: int, folder: Path, arguments: dict[str, Any]) -> None:
    tempfile.tempdir = str(folder.parent)
    model = sharded_toy(seed)
    _die_before(step, folder)
    save(model, folder, **arguments)


def kill_at_every_step(seed: int, folder: Path, restore: Callable[[], None], **arguments: Any) -> Iterator[int]:
    """Saves `sharded_toy(seed)` to `folder` in a process that is killed before its first change to the disk, then in
    one before its second, and so on; after each it yields the number of changes that were made. The last one ends by
    itself, and is not yielded. `restore` puts the folder back before each."""
    for step in itertools.count():
        restore()
        (ended,) = forked(1, _save_and_die, step, seed, folder, arguments)
        if ended == 0:
            return
        assert ended == -signal.SIGKILL, f"the save failed by itself before step {step}"
        yield step


def traced(monkeypatch: pytest.MonkeyPatch, saving: Callable[[], None]) -> list[tuple[str, str]]:
    """What `saving` brings to the disk, moves and removes, in order: the step, and the name of the file or folder."""
    steps = []

    def note(step: str, function: Callable[..., Any], path: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            steps.append((step, Path(path(*args)).name))
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", note("sync", os.fsync, lambda number: os.readlink(f"/proc/self/fd/{number}")))
        patch.setattr(os, "replace", note("move", os.replace, lambda source, target: target))
        patch.setattr(os, "unlink", note("remove", os.unlink, lambda path: path))
        saving()
    return steps
