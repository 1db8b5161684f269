"""A rank that is killed within a forward ends it on every other rank, in seconds, and is named by all of them."""

import signal
import socket
import time
from typing import Any

import pytest
import torch

from failure_case import HOWS, SECONDS, X, die, on_ranks, sharded, told


def dies(rank: int, how: str, victim: int) -> dict[str, Any]:
    model = sharded(**HOWS[how])
    model(X)
    if rank == victim:
        model.fail = die
    return told(model)


@pytest.mark.parametrize(
    ("size", "how"), [(2, "plain"), (3, "plain"), (4, "plain"), (3, "overlap"), (3, "deterministic")]
)
def test_a_killed_rank_is_named_by_the_others(tmp_path, size, how):
    codes, found = on_ranks(size, tmp_path, dies, how, 1)
    assert codes == [-signal.SIGKILL if rank == 1 else 0 for rank in range(size)]
    for one in found.values():
        assert one["told"].startswith(f"rank 1 of {size} died, or does not answer")
        assert one["seconds"] < SECONDS


def test_the_store_is_lost_with_the_rank_that_keeps_it(tmp_path):
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    codes, found = on_ranks(3, tmp_path, dies, "plain", 0, method=f"tcp://127.0.0.1:{port}")
    assert codes == [-signal.SIGKILL, 0, 0]
    for one in found.values():
        assert one["told"].startswith("the store is lost, and most likely rank 0 of the default process group")
        assert one["seconds"] < SECONDS


def unchecked(rank: int) -> dict[str, Any]:
    model = sharded(check_inputs=False)
    return told(model, torch.ones(5 + rank % 2, 12))


@pytest.mark.parametrize("size", [2, 3])
def test_unchecked_inputs_of_other_shapes_end_every_rank(tmp_path, size):
    start = time.monotonic()
    codes, found = on_ranks(size, tmp_path, unchecked)
    print(codes, found)
    assert time.monotonic() - start < SECONDS and None not in codes
    # gloo aborts a process that is sent more than it expects.
    assert {0} < {*codes} <= {0, -signal.SIGABRT}
    for one in found.values():
        assert "died, or does not answer" in one["told"]
