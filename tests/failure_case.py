"""What the tests of ranks that fail share: a model that fails in its middle, in processes of their own.

In processes of their own, as the ranks must know the same process groups, and some of them die.
"""

import datetime
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_layers
from close import randomise
from forked import forked
from tp_layers import link

SECONDS = 30
PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
HOWS: dict[str, dict[str, Any]] = {"plain": {}, "overlap": {"overlap": 2}, "deterministic": {"deterministic": True}}
X = torch.ones(5, 12)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., 12]` -> `[.., 12]`."""
        return x + self.down(torch.relu(self.up(x)))


class Blocks(nn.Module):
    """Three blocks; `fail` is called after block `at`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.fail: Any = lambda: None
        self.at = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., 12]` -> `[.., 12]`."""
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == self.at:
                self.fail()
        return x


def sharded(**how: Any) -> Blocks:
    return tp_layers.apply(randomise(Blocks()), PLAN, **how)


def boom() -> None:
    raise ValueError("boom")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def joined(
    rank: int, size: int, folder: Path, method: str, case: Callable[..., dict[str, Any]], args: tuple[Any, ...]
) -> None:
    """Runs a case in a process of its own, which writes down what it found."""
    # Who is alive answers within one second.
    link.ROLL_LOOKS = 25
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=method, rank=rank, world_size=size, timeout=limit)
    with torch.no_grad():
        found = case(rank, *args)
    (folder / str(rank)).write_text(json.dumps(found))


def on_ranks(
    size: int, folder: Path, case: Callable[..., dict[str, Any]], *args: Any, method: str = ""
) -> tuple[list[int | None], dict[int, dict[str, Any]]]:
    """How the processes ended, and what `case(rank, *args)` found in those that lived; `folder` is an empty one."""
    codes = forked(size, joined, folder, method or f"file://{folder / 'store'}", case, args)
    files = {rank: folder / str(rank) for rank in range(size)}
    return codes, {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}


def told(model: Blocks, x: torch.Tensor = X) -> dict[str, Any]:
    """How a forward that fails does."""
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as error:
        model(x)
    notes = getattr(error.value, "__notes__", [])
    seconds = time.monotonic() - start
    return {"kind": type(error.value).__name__, "told": "\n".join([str(error.value), *notes]), "seconds": seconds}
