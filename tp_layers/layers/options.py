"""How the layers of a sharded model compute: the keywords that `apply` and `load` hand on to each of them."""

from dataclasses import dataclass

import torch

from ..kernels.backend import requested


@dataclass(frozen=True)
class Options:
    """`backend`: "auto", "triton" or "torch" (None: the process's default); `reduce_dtype`: of partial sums while they
    are reduced (None: the layer's own dtype); `copy`: False leaves full weights in place and reads this rank's part.

    Raises:
        ValueError: the backend is unknown, or `reduce_dtype` is not a floating-point dtype.
    """

    backend: str | None = None
    reduce_dtype: torch.dtype | None = None
    copy: bool = True

    def __post_init__(self) -> None:
        requested(self.backend)
        if self.reduce_dtype is not None and not self.reduce_dtype.is_floating_point:
            raise ValueError(f"reduce_dtype must be a floating-point dtype, got {self.reduce_dtype}")


DEFAULT = Options()
