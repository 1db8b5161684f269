"""The anonymous memory of this process while something runs, seen from outside of torch."""

import ctypes
import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tp_layers.loader.report import anonymous_bytes


def give_back() -> None:
    """Returns freed memory to the system: glibc keeps it, and gives it out again unseen and faster than fresh pages."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def most_memory(seconds: float) -> Iterator[list[int]]:
    """Yields a list of one number: the most bytes beyond those at first, looked at every `seconds`."""
    before, seen, done = anonymous_bytes(), [0], threading.Event()

    def look() -> None:
        while not done.wait(seconds):
            seen[0] = max(seen[0], anonymous_bytes() - before)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()
        seen[0] = max(seen[0], anonymous_bytes() - before)
