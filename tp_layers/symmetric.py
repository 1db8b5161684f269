"""All-reduces through torch's symmetric memory: memory of each rank that the others read and write by themselves.

    way        one element's sum is computed by      and comes to the others    traffic of a rank
    one_shot   every rank, in rank order             -                          size - 1 messages read
    two_shot   the rank whose part it lies in        as a copy                  twice a part of the message per rank
    multimem   the switch, for the rank whose part   by the switch's multicast  a message read, a message written
               it lies in

Ranks that differ in one bit hang later on, so every rank must come to the same bits. One-shot does, as torch's kernel
adds in rank order on every rank, whichever order it reads in; the other two do, as one rank computes what all get. That
is why torch's `multimem_one_shot_all_reduce` is not here: each rank asks the switch for its own sum, and no order of a
switch's sum is specified. The benchmark compares the ranks' bits all the same.

One buffer of symmetric memory serves a group. A tensor is copied in, by one-shot's own kernel or before it, and its sum
is written to where it was, so no result shares memory with a later one. (A pool of symmetric memory for the results
themselves would need every rank's allocator to decide alike in every call.)

Sources: torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu and CUDASymmetricMemory-inl.cuh.
"""

from collections.abc import Callable
from typing import Any, cast

import torch

# What the kernels take: by dtype, and vectors of 16 bytes.
DTYPES = (torch.bfloat16, torch.float32)
ALIGNMENT = 16
# torch compiles the two-shot kernel that does not work in place for these.
TWO_SHOT_SIZES = (2, 4, 8)

Sum = Callable[[torch.Tensor, torch.Tensor, str], None]


def _one_shot(buffer: torch.Tensor, x: torch.Tensor, name: str) -> None:
    # Each thread stores where it has loaded, and loads nothing of `x` afterwards.
    torch.ops.symm_mem.one_shot_all_reduce_copy_out(buffer, x, "sum", name, x)


def _two_shot(buffer: torch.Tensor, x: torch.Tensor, name: str) -> None:
    buffer.copy_(x)
    torch.ops.symm_mem.two_shot_all_reduce_out(buffer, "sum", name, x)


def _multimem(buffer: torch.Tensor, x: torch.Tensor, name: str) -> None:
    buffer.copy_(x)
    torch.ops.symm_mem.multimem_all_reduce_(buffer, "sum", name)
    x.copy_(buffer)


# Each sums the ranks' flat `x` in place, through the flat `buffer` of the same length, in the group of that name.
SUMS: dict[str, Sum] = {"one_shot": _one_shot, "two_shot": _two_shot, "multimem": _multimem}
_OPERATORS = {
    "one_shot": "one_shot_all_reduce_copy_out",
    "two_shot": "two_shot_all_reduce_out",
    "multimem": "multimem_all_reduce_",
}


def missing(way: str, size: int) -> str:
    """Why a group of `size` ranks cannot sum in a `way` here; empty if it can, as far as is known without trying."""
    if not hasattr(torch.ops.symm_mem, _OPERATORS[way]):
        return f"torch {torch.__version__} has no symm_mem.{_OPERATORS[way]}"
    if way == "two_shot" and size not in TWO_SHOT_SIZES:
        return f"torch's two-shot sum is for {', '.join(map(str, TWO_SHOT_SIZES))} ranks"
    return ""


def fits(dtype: torch.dtype, nbytes: int) -> bool:
    """Whether the kernels take a message. All ranks answer alike, so nothing is asked of addresses here."""
    return dtype in DTYPES and nbytes % ALIGNMENT == 0


class Staging:
    """A group's buffer: `allocate`, then, where no rank has failed to, `meet`; then any number of sums."""

    def __init__(self, nbytes: int, device: torch.device, group_name: str) -> None:
        self.nbytes, self.device, self.group_name = -(-nbytes // ALIGNMENT) * ALIGNMENT, device, group_name
        self.buffer: torch.Tensor | None = None
        self.stream: torch.cuda.Stream | None = None
        self.multicast = False

    def allocate(self) -> None:
        """Takes the memory, whatever the mode of the call that needs it first."""
        import torch.distributed._symmetric_memory as symmetric

        with torch.inference_mode(False):
            self.buffer = symmetric.empty(self.nbytes, dtype=torch.uint8, device=self.device)

    def meet(self) -> None:
        """Maps the other ranks' buffers; a collective."""
        import torch.distributed._symmetric_memory as symmetric

        assert self.buffer is not None
        handle = symmetric.rendezvous(self.buffer, cast(Any, self.group_name))
        self.multicast = bool(handle.multicast_ptr)

    def sum(self, way: str, x: torch.Tensor) -> None:
        """Sums the ranks' contiguous `x`, of at most `nbytes`, in place, on the current stream."""
        assert self.buffer is not None
        self._take_turns()
        local = x.view(-1)
        offset = local.storage_offset() * local.element_size()
        if offset % ALIGNMENT or local.data_ptr() % ALIGNMENT:
            # This rank's affair: the others need not do the same.
            local = local.clone()
        SUMS[way](self.buffer.view(x.dtype)[: local.numel()], local, self.group_name)
        if local.data_ptr() != x.data_ptr():
            x.view(-1).copy_(local)

    def _take_turns(self) -> None:
        """Waits for the last sum if that was on another stream: there is one buffer."""
        if self.device.type != "cuda":
            return
        stream = torch.cuda.current_stream(self.device)
        if self.stream is not None and self.stream != stream:
            stream.wait_stream(self.stream)
        self.stream = stream
