"""How the layers of a sharded model compute: the keywords that `apply` and `load` hand on to each of them."""

from dataclasses import dataclass
from typing import Any

import torch

from ..kernels.backend import requested


@dataclass(frozen=True)
class Options:
    """The four of them; a field left out changes nothing.

    `backend`: "auto", "triton" or "torch" (None: the process's default). `reduce_dtype`: of partial sums while they are
    reduced (None, or one narrower than theirs: their own). `copy`: False leaves full weights in place, and each rank
    reads its part of them. `fuse`: whether blocks are fused (see `plans/fuse.py`); None: where that is faster. False
    leaves sums of two streams apart, too (see `plans/streams.py`).

    Raises:
        ValueError: the backend is unknown, `reduce_dtype` is not a floating-point dtype, or `fuse` is neither.
    """

    backend: str | None = None
    reduce_dtype: torch.dtype | None = None
    copy: bool = True
    fuse: bool | None = None

    def __post_init__(self) -> None:
        requested(self.backend)
        dtype = self.reduce_dtype
        if dtype is not None and not is_wide_float(dtype):
            raise ValueError(f"reduce_dtype must be a floating-point dtype such as torch.float32, got {dtype!r}")
        if self.fuse not in (None, True, False):
            raise ValueError(f"fuse must be True, False, or None for where it is faster, got {self.fuse!r}")

    @property
    def common(self) -> str:
        """What all ranks must have alike: dtypes of collectives, and which are joined. Backends may differ."""
        return f"reduced in {self.reduce_dtype}, streams {'apart' if self.fuse is False else 'joined'}"


def is_wide_float(dtype: Any) -> bool:
    """Whether it is a floating-point dtype that can be computed in, which float8 is not."""
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1


DEFAULT = Options()
