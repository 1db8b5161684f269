"""The `ranks` fixture: `ranks(n, function, *args)` runs `function(group, *args)` on n CPU ranks."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tp_layers.launch import Ranks

MOST_RANKS = 4

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pool() -> Iterator[Ranks]:
    """One set of processes for the whole run: starting them costs more than most tests."""
    with Ranks(MOST_RANKS, timeout=120) as ranks:
        yield ranks


@pytest.fixture
def ranks(pool: Ranks) -> Callable[..., list[Any]]:
    """Runs a function of (group, ...) on the first n ranks and returns their results in rank order."""

    def run(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        return pool.run(function, *args, size=size)

    return run
