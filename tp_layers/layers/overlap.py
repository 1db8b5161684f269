"""Overlap: the sum over ranks of a rowwise output, taken while something else is computed.

    in chunks   each chunk of rows is reduced while the next one is computed
    put off     the whole is reduced while whatever comes next is computed, up to the first operation that reads it

    time        whole    GEMM + latency + transfer
                chunked  the first chunk's GEMM, then chunk by chunk the longer of GEMM and reduction, then the last
                         chunk's reduction

A chunk costs another latency, so the number of chunks follows from what the group and the device do in a second (see
`rates.py`), and is 1 where chunks cannot pay. Where something is differentiated, or under autocast, the whole is
computed and reduced.

What is put off leaves the layer as torch's `AsyncCollectiveTensor`, which any operation of torch waits for; code that
reads memory by itself (`from_dlpack`) does not.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import windows
from ..collectives import all_reduce, all_reduce_later, memory_for_sum, start_all_reduce
from ..kernels.contract import as_rows, needs_grad
from ..rates import Rates

if TYPE_CHECKING:
    from .linear import RowwiseLinear


@dataclass(frozen=True)
class Overlap:
    """How one layer does it: `chunks`, a number or the rates that it follows from; `later`: whether to put it off."""

    chunks: int | Rates
    later: bool = False

    def reduced(
        self, layer: "RowwiseLinear", x: torch.Tensor | Sequence[torch.Tensor], wide: torch.dtype | None
    ) -> torch.Tensor:
        """The layer's output `[.., N]`, from the ranks' partial sums, in the dtype `wide` if there is one."""
        xs = [x] if isinstance(x, torch.Tensor) else list(x)
        # Autocast casts what F.linear takes, and no chunk written in place.
        autocast = torch.is_autocast_enabled(xs[0].device.type)
        if autocast or needs_grad(*xs, layer.weight, layer.bias):
            return all_reduce(layer.partial_sum(x, wide), layer.group)
        count = self._count(layer, xs, wide)
        if count > 1:
            return _in_chunks(layer, xs, wide, count)
        y = layer.partial_sum(x, wide, memory(layer, x, wide))
        return all_reduce_later(y, layer.group) if self.later and wide is None else all_reduce(y, layer.group)

    def _count(self, layer: "RowwiseLinear", xs: Sequence[torch.Tensor], wide: torch.dtype | None) -> int:
        rows = xs[0].shape[:-1].numel()
        if isinstance(self.chunks, int):
            return max(1, min(self.chunks, rows))
        itemsize = (wide or xs[0].dtype).itemsize
        # All ranks must come to one number: they count for the one that has the most columns.
        return self.chunks.chunks(rows, layer.out_features, layer.spec.longest(layer.group.size), itemsize)


def memory(
    layer: "RowwiseLinear", x: torch.Tensor | Sequence[torch.Tensor], wide: torch.dtype | None, chunks: int = 1
) -> torch.Tensor | None:
    """Where the layer's partial sum is to be written, if all-reduces are faster there; None: anywhere."""
    if not windows.WINDOWS:
        return None
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    if needs_grad(*xs, layer.weight, layer.bias) or torch.is_autocast_enabled(xs[0].device.type):
        return None
    shape = (*xs[0].shape[:-1], layer.out_features)
    return memory_for_sum(shape, wide or layer.weight.dtype, xs[0].device, layer.group, chunks)


def _in_chunks(
    layer: "RowwiseLinear", xs: Sequence[torch.Tensor], wide: torch.dtype | None, count: int
) -> torch.Tensor:
    shape, dtype = (*xs[0].shape[:-1], layer.out_features), wide or layer.weight.dtype
    inputs = zip(*(as_rows(x).tensor_split(count) for x in xs), strict=True)
    if torch.compiler.is_compiling():
        sums = [start_all_reduce(layer.partial_sum(chunk, wide), layer.group) for chunk in inputs]
        return torch.cat([wait() for wait in sums]).view(shape)
    y = memory(layer, xs, wide, count)
    y = xs[0].new_empty(shape, dtype=dtype) if y is None else y
    # Row views of one buffer: each is contiguous, and nothing is put together afterwards.
    sums = [
        start_all_reduce(layer.partial_sum(chunk, wide, out=rows), layer.group)
        for chunk, rows in zip(inputs, as_rows(y).tensor_split(count), strict=True)
    ]
    for wait in sums:
        wait()
    return y
