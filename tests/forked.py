"""Processes that a test may kill, ranks or single ones: of their own, forked from one that has imported everything."""

import functools
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

LIMIT_SECONDS = 100.0


def _start(function: Callable[..., None], *args: Any) -> int:
    child = os.fork()
    if child == 0:
        try:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            function(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return child


def _wait(child: int, limit: float) -> int | None:
    """How a process ended; None: it had to be ended."""
    while time.monotonic() < limit:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(child, 9)
    os.waitpid(child, 0)
    return None


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        size, function, args = pipe.recv()
        children = [_start(function, rank, size, *args) for rank in range(size)]
        limit = time.monotonic() + LIMIT_SECONDS
        pipe.send([_wait(child, limit) for child in children])


@functools.cache
def _server() -> Connection:
    # One process for all: importing takes seconds, forking does not. It has no threads that a fork could trip over.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs,), daemon=True).start()
    return ours


def forked(size: int, function: Callable[..., None], *args: Any) -> list[int | None]:
    """The exit codes of `function(rank, size, *args)` in `size` processes; 1: it raised, None: it did not end."""
    _server().send((size, function, args))
    found: list[int | None] = _server().recv()
    return found
