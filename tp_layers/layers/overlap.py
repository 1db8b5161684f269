"""Overlap: the sum over ranks of a rowwise output, taken while something else is computed.

    in chunks   each chunk of the output's columns is reduced while later ones are computed
    put off     the whole is reduced while whatever comes next is computed, up to the first operation that reads it

    time        whole    GEMM + latency + transfer
                chunked  the first chunk's GEMM, then the longer of the other GEMMs and the reductions before the last,
                         then the last chunk's reduction

A chunk of columns needs its own rows of the weight only, so that the weight is read once, as without chunks; a chunk of
the input's rows would need all of it. It costs a further all-reduce and reads the input anew, so the number of chunks,
and their widths, follow from what the group and the device do in a second (see `rates.py`); there is one where chunks
cannot pay. Where something is differentiated, under autocast, and under torch.compile without a number of chunks, the
whole is computed and reduced. Until they are put together, chunks take the memory of the output once more.

What is put off leaves the layer as torch's `AsyncCollectiveTensor`, which any operation of torch waits for; code that
reads memory by itself (`from_dlpack`) does not.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from .. import windows
from ..collectives import all_reduce, memory_for_sum
from ..kernels.contract import needs_grad
from ..rates import Rates
from ..under_way import all_reduce_later, start_all_reduce

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
        widths = self._widths(layer, xs, wide)
        if len(widths) > 1:
            return _in_chunks(layer, x, wide, widths)
        y = layer.partial_sum(x, wide, memory(layer, x, wide))
        return all_reduce_later(y, layer.group) if self.later and wide is None else all_reduce(y, layer.group)

    def _widths(self, layer: "RowwiseLinear", xs: Sequence[torch.Tensor], wide: torch.dtype | None) -> list[int]:
        """Columns of each chunk of the output."""
        N = layer.out_features
        if isinstance(self.chunks, int):
            count = min(self.chunks, N)
            return [N * (number + 1) // count - N * number // count for number in range(count)]
        if torch.compiler.is_compiling():
            # Rows may be symbols there, and one graph serves any number of them.
            return [N]
        itemsize = (wide or xs[0].dtype).itemsize
        # All ranks must come to the same: they compute it for the one that has the most columns.
        return self.chunks.widths(xs[0].shape[:-1].numel(), N, layer.spec.longest(layer.group.size), itemsize)


def memory(
    layer: "RowwiseLinear",
    x: torch.Tensor | Sequence[torch.Tensor],
    wide: torch.dtype | None,
    width: int | None = None,
) -> torch.Tensor | None:
    """Where the layer's partial sum, or `width` columns of it, is to be written, if all-reduces are faster there."""
    if not windows.WINDOWS:
        return None
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    if needs_grad(*xs, layer.weight, layer.bias) or torch.is_autocast_enabled(xs[0].device.type):
        return None
    shape = (*xs[0].shape[:-1], layer.out_features if width is None else width)
    return memory_for_sum(shape, wide or layer.weight.dtype, xs[0].device, layer.group)


def _in_chunks(
    layer: "RowwiseLinear", x: torch.Tensor | Sequence[torch.Tensor], wide: torch.dtype | None, widths: Sequence[int]
) -> torch.Tensor:
    ends = [0, *itertools.accumulate(widths)]
    parts = [slice(*pair) for pair in itertools.pairwise(ends)]
    sums = [start_all_reduce(chunk, layer.group) for chunk in layer.partial_sums(x, wide, parts)]
    if torch.compiler.is_compiling():
        return torch.cat([wait() for wait in sums], -1)
    first = x if isinstance(x, torch.Tensor) else x[0]
    y = first.new_empty((*first.shape[:-1], layer.out_features), dtype=wide or layer.weight.dtype)
    # While one is copied the next ones are reduced.
    for part, wait in zip(parts, sums, strict=True):
        y[..., part] = wait()
    return y
