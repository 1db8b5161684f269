"""Memory that NCCL has registered: its all-reduce of a tensor in it need not go through NCCL's own buffers.

NCCL's allocator makes the memory, a pool of torch's caching allocator hands it out, and the group's backend registers
what the pool has and will have. A tensor of the pool lives as long as any other: nothing else is put where it is. What
the pool has taken stays with it, as it does with every pool of the caching allocator.

Sources: "Memory pools" in torch's CUDA notes, and NCCL's "User Buffer Registration".
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist


def missing(device: torch.device, process_group: dist.ProcessGroup) -> str:
    """Why the group has no such memory; empty if it should."""
    if not hasattr(torch.cuda, "MemPool") or not hasattr(torch.cuda, "use_mem_pool"):
        return f"torch {torch.__version__} has no memory pools"
    backend = process_group._get_backend(device)
    if not hasattr(backend, "register_mem_pool"):
        return f"{type(backend).__name__} registers no memory"
    return ""


class Pool:
    """The registered memory of one group, on one device; its communicator is there already."""

    def __init__(self, device: torch.device, process_group: dist.ProcessGroup) -> None:
        backend: Any = process_group._get_backend(device)
        self.device = device
        self.pool = torch.cuda.MemPool(backend.mem_allocator)
        # Segments that are taken later are registered as they are.
        backend.register_mem_pool(self.pool)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the pool."""
        with torch.cuda.use_mem_pool(self.pool, self.device):
            return torch.empty(shape, dtype=dtype, device=self.device)
