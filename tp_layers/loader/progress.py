"""The progress bar of `load`: on rank 0, in bytes, where tqdm is installed and the output is a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..group import Group


@contextmanager
def progress(total: int, group: Group) -> Iterator[Callable[[int], object]]:
    """Yields a function to be told of each number of bytes that is done, of `total` in all."""
    try:
        from tqdm import tqdm
    except ImportError:
        yield lambda count: None
        return
    # None leaves it to tqdm, which is silent where the output is no terminal.
    silent = None if group.rank == 0 else True
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading this rank's shards", disable=silent) as bar:
        yield bar.update
