"""Ranks on this machine: CPU processes joined by gloo, that run functions one after the other.

`verify` and the command line use them to try a plan without a GPU, and so do the package's tests.
"""

import datetime
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .group import Group

# After one rank has failed, the others get this long to answer before they are ended.
GRACE_SECONDS = 5.0
GUARD = ' (a script that starts ranks needs `if __name__ == "__main__":`, since they import it)'


class RankError(RuntimeError):
    """A function failed on some rank; the message holds the tracebacks of the ranks that raised."""


class Ranks:
    """`size` processes that start on the first `run`, stay for the next, and are replaced after a failure."""

    def __init__(self, size: int, *, timeout: float = 120.0) -> None:
        self.size, self.timeout = size, timeout
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: str | None = None

    def run(self, function: Callable[..., Any], *args: Any, size: int | None = None) -> list[Any]:
        """`function(group, *args)` on the first `size` ranks (default: all), and its results in rank order.

        `group` is a `Group` of just these ranks. The function and its arguments are pickled.

        Raises:
            RankError: a rank raised, died, or did not answer within the timeout. No process is left waiting.
        """
        size = self.size if size is None else size
        task = pickle.dumps((function, args, size))
        if not self._processes:
            self._start()
        for pipe in self._pipes[:size]:
            pipe.send_bytes(task)
        answers = self._collect(size)
        failed = {rank: text for rank, (kind, text) in answers.items() if kind == "error"}
        if failed or len(answers) < size:
            silent = [rank for rank in range(size) if rank not in answers]
            self.close()
            parts = [f"rank {rank} of {size} failed:\n{text}" for rank, text in sorted(failed.items())]
            parts += [f"no answer from rank {', '.join(map(str, silent))}: ended"] if silent else []
            raise RankError("\n".join(parts))
        return [answers[rank][1] for rank in range(size)]

    def close(self) -> None:
        """Ends the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._pipes, self._folder = [], [], None

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="tp_layers_")
        store = str(Path(self._folder) / "store")
        context = multiprocessing.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.size, store, self.timeout, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, size: int) -> dict[int, tuple[str, Any]]:
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + self.timeout
        while len(answers) < size:
            waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:size]) if rank not in answers}
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = waiting[pipe]  # type: ignore[index]
                try:
                    answers[rank] = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, OSError):
                    answers[rank] = ("error", "the process died" + GUARD)
                if answers[rank][0] == "error":
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return answers


def _serve(rank: int, size: int, store: str, timeout: float, pipe: Connection) -> None:
    """The life of one rank: join, then answer until the pipe closes."""
    torch.set_num_threads(1)
    if sys.platform == "linux":
        # The host's name need not resolve; these ranks only talk to each other.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=limit)
    # Every rank of the world takes part in making each group, as a member or not.
    joined = {count: dist.new_group(list(range(count))) for count in range(2, size)}
    groups = {count: Group.of(found) for count, found in joined.items() if rank < count}
    # Of all ranks, and of each alone: two ranks know equally many groups, and so get a link (see `failure.py`).
    groups |= {1: Group.of(dist.new_group([rank], use_local_synchronization=True)), size: Group.of()}
    while True:
        try:
            task = pipe.recv_bytes()
        except (EOFError, OSError):
            return
        try:
            function, args, count = pickle.loads(task)
            answer = pickle.dumps(("ok", function(groups[count], *args)))
        except BaseException:
            answer = pickle.dumps(("error", traceback.format_exc()))
        pipe.send_bytes(answer)
