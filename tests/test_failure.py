"""A rank that raises, or is killed, within a forward ends it on every rank, in seconds, and is named by all of them.

Each test has processes of its own: they know the same process groups, and some of them die.
"""

import datetime
import json
import os
import signal
import socket
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
from tp_layers.collectives import largest

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
    """Three blocks; `fail` is called between the first and the second."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.fail: Any = lambda: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., 12]` -> `[.., 12]`."""
        for number, block in enumerate(self.blocks):
            if number == 1:
                self.fail()
            x = block(x)
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


@pytest.fixture
def run(tmp_path):
    """`run(size, case, *args)`: how each rank's process ended, and what `case(rank, *args)` found on those that lived."""

    def run(size: int, case: Any, *args: Any, method: str = "") -> tuple[list[int | None], dict[int, dict[str, Any]]]:
        codes = forked(size, joined, tmp_path, method or f"file://{tmp_path / 'store'}", case, args)
        files = {rank: tmp_path / str(rank) for rank in range(size)}
        return codes, {rank: json.loads(file.read_text()) for rank, file in files.items() if file.exists()}

    return run


def told(model: Blocks, x: torch.Tensor = X) -> dict[str, Any]:
    """How a forward that fails does."""
    start = time.monotonic()
    with pytest.raises((ValueError, RuntimeError)) as error:
        model(x)
    notes = getattr(error.value, "__notes__", [])
    seconds = time.monotonic() - start
    return {"kind": type(error.value).__name__, "told": "\n".join([str(error.value), *notes]), "seconds": seconds}


def raises(rank: int, how: str) -> dict[str, Any]:
    """Rank 1 raises in its second forward; then the caller's group and the model are used again."""
    model = sharded(**HOWS[how])
    first = model(X)
    if rank == 1:
        model.fail = boom
    found = told(model)
    total = torch.ones(1000)
    dist.all_reduce(total)
    model.fail = lambda: None
    refused = told(model)
    part = told(model.blocks[0])
    again = sharded(**HOWS[how])
    same = torch.equal(again(X), first) and torch.equal(model(X), first)
    return {**found, "refused": refused, "part": part["told"], "total": total.unique().tolist(), "same": same}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_raised_error_is_raised_on_every_rank(run, size, how):
    codes, found = run(size, raises, how)
    assert codes == [0] * size
    for rank, one in found.items():
        why = f"rank 1 of {size} failed: ValueError: boom"
        assert one["kind"] == ("ValueError" if rank == 1 else "RuntimeError") and why in one["told"]
        assert one["told"].startswith("boom" if rank == 1 else why)
        assert one["refused"]["told"] == one["part"]
        assert one["part"] == f"this model cannot run, as {why}; shard or load it again, on every rank"
        assert one["seconds"] < SECONDS and one["refused"]["seconds"] < 1
        assert one["total"] == [size] and one["same"]


def dies(rank: int, how: str, victim: int) -> dict[str, Any]:
    model = sharded(**HOWS[how])
    model(X)
    if rank == victim:
        model.fail = die
    return told(model)


@pytest.mark.parametrize(("size", "how"), [(2, "plain"), (3, "plain"), (3, "overlap"), (3, "deterministic")])
def test_a_killed_rank_is_named_by_the_others(run, size, how):
    codes, found = run(size, dies, how, 1)
    assert codes == [-signal.SIGKILL if rank == 1 else 0 for rank in range(size)]
    for one in found.values():
        assert one["told"].startswith(f"rank 1 of {size} died, or does not answer")
        assert one["seconds"] < SECONDS


def test_the_store_is_lost_with_the_rank_that_keeps_it(run):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    codes, found = run(3, dies, "plain", 0, method=f"tcp://127.0.0.1:{port}")
    assert codes == [-signal.SIGKILL, 0, 0]
    for one in found.values():
        assert one["told"].startswith("the store is lost, and most likely rank 0 of the default process group")
        assert one["seconds"] < SECONDS


def compiled(rank: int) -> dict[str, Any]:
    """Blocks are compiled; rank 1 raises between them, and the model is used again."""
    model = sharded()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    first = model(X)
    # The other one waits outside of compiled code, within which nobody looks.
    model.fail = boom if rank == 1 else lambda: largest(X, model.blocks[0].up.group)
    found = told(model)
    model.fail = lambda: None
    sharded()
    return {**found, "same": torch.equal(model(X), first)}


@pytest.mark.slow
def test_compiled_blocks_take_the_new_link(run):
    codes, found = run(2, compiled)
    assert codes == [0, 0]
    for one in found.values():
        assert "rank 1 of 2 failed: ValueError: boom" in one["told"] and one["same"]


class Untouched:
    """A store that may not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"store.{name}")


def healthy(rank: int) -> dict[str, Any]:
    """A forward within the handler of an error, without a store; then one in which a rank is slow."""
    model = sharded()
    first = model(X)
    own: Any = model.blocks[0].up.group.link
    store, own._store = own._store, Untouched()
    try:
        raise KeyError("of the caller's own")
    except KeyError:
        same = torch.equal(model(X), first)
    own._store = store
    if rank == 1:
        model.fail = lambda: time.sleep(3)
    return {"same": same and torch.equal(model(X), first), "generation": own.generation, "cause": own.cause}


def test_a_healthy_forward_does_not_use_the_store_and_a_slow_rank_is_no_failure(run):
    codes, found = run(3, healthy)
    assert codes == [0] * 3
    assert all(one == {"same": True, "generation": 1, "cause": ""} for one in found.values())


def shapes(rank: int) -> dict[str, Any]:
    """Rank 1 is given more rows, and then as many as the others."""
    model = sharded()
    found = told(model, torch.ones(5 + rank % 2, 12))
    return {**found, "after": model(X).unique().tolist()}


@pytest.mark.parametrize("size", [2, 3])
def test_inputs_of_other_shapes_are_refused_by_every_rank_which_can_go_on(run, size):
    codes, found = run(size, shapes)
    assert codes == [0] * size
    for one in found.values():
        assert one["told"].startswith(f"rank 1 of {size} was given another 'x' than rank 0")
        assert one["seconds"] < SECONDS and one["after"] == found[0]["after"]


def unchecked(rank: int) -> dict[str, Any]:
    model = sharded(check_inputs=False)
    return told(model, torch.ones(5 + rank % 2, 12))


@pytest.mark.parametrize("size", [2, 3])
def test_unchecked_inputs_of_other_shapes_end_every_rank(run, size):
    start = time.monotonic()
    codes, found = run(size, unchecked)
    print(codes, found)
    assert time.monotonic() - start < SECONDS and None not in codes
    # gloo aborts a process that is sent more than it expects.
    assert {0} < {*codes} <= {0, -signal.SIGABRT}
    for one in found.values():
        assert "died, or does not answer" in one["told"]


def unlike(rank: int) -> dict[str, Any]:
    """Rank 0 knows a process group more than the others."""
    dist.new_group([0])
    plain, model = randomise(Blocks()), sharded()
    return {"link": model.blocks[0].up.group.link is not None, "far": float((model(X) - plain(X)).abs().max())}


def test_ranks_that_know_unlike_process_groups_get_no_link(run):
    codes, found = run(2, unlike)
    assert codes == [0, 0]
    assert all(not one["link"] and one["far"] < 1e-5 for one in found.values())
