"""Memory for weights on the CPU, in large pages where the system gives them on request.

First touched in pages of 4 kB, 1 GB costs a quarter of a second (two cores, Linux 6.18), in pages of 2 MB a third of
that; a load into fresh memory spends more on it than on copying.
"""

import ctypes
import functools
import mmap
from collections.abc import Callable

import torch

PAGE_BYTES = 2 << 20


def empty(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """`torch.empty` on `device`; on the CPU its memory may come in large pages, of which none reaches beyond it."""
    made = torch.empty(shape, dtype=dtype, device=device)
    if device.type == "cpu":
        first = -(-made.data_ptr() // PAGE_BYTES) * PAGE_BYTES
        nbytes = (made.data_ptr() + made.nbytes) // PAGE_BYTES * PAGE_BYTES - first
        if nbytes > 0 and (advise := _madvise()) is not None:
            # It is advice: where the system refuses it, its small pages serve as well.
            advise(ctypes.c_void_p(first), ctypes.c_size_t(nbytes), mmap.MADV_HUGEPAGE)
    return made


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """The C library's function; None where there is none, or no large pages to ask for."""
    try:
        return ctypes.CDLL(None).madvise if hasattr(mmap, "MADV_HUGEPAGE") else None
    except (OSError, AttributeError, TypeError):
        return None
