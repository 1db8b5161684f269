"""What every GEMM launcher asks of its arguments, and the 2-D views that the kernels take."""

from collections.abc import Sequence

import torch

# Half-open ranges (start, stop) of a weight's rows or columns; a further entry, as of a spec's ranges, is not read.
Ranges = Sequence[tuple[int, ...]]


def check_linear(xs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Raises ValueError unless the tensors can enter one GEMM: dtype, device, leading shape, the bias's length."""
    lead = xs[0].shape[:-1]
    for x in xs:
        if x.dtype != weight.dtype or x.device != weight.device:
            raise ValueError(f"x is {x.dtype} on {x.device}, the weight {weight.dtype} on {weight.device}")
        if x.shape[:-1] != lead:
            raise ValueError(f"the inputs' leading shapes differ: {tuple(lead)} and {tuple(x.shape[:-1])}")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.device != weight.device):
        raise ValueError(
            f"the bias has shape {tuple(bias.shape)} on {bias.device}, "
            f"the weight {weight.shape[0]} rows on {weight.device}"
        )


def check_ranges(ranges: Ranges | None, length: int, what: str) -> list[tuple[int, int]]:
    """`ranges`, by default the whole of `length`, as (start, stop) pairs.

    Raises:
        ValueError: there is none, or one is not within `length`.
    """
    pairs = [(0, length)] if ranges is None else [(entry[0], entry[1]) for entry in ranges]
    if not pairs or any(not 0 <= start <= stop <= length for start, stop in pairs):
        raise ValueError(f"the ranges {pairs} are not ranges of the weight's {length} {what}")
    return pairs


def in_turn(pairs: Sequence[tuple[int, int]], length: int) -> bool:
    """Whether the ranges, one after the other, are the whole of `length`."""
    end = 0
    for start, stop in pairs:
        if start != end:
            return False
        end = stop
    return end == length


def in_one_run(pairs: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """(start, stop) of the ranges one after the other, if they follow each other without a gap."""
    start = pairs[0][0]
    follow = in_turn([(first - start, last - start) for first, last in pairs], pairs[-1][1] - start)
    return (start, pairs[-1][1]) if follow else None


def cast(bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """A bias in the dtype that `F.linear` asks for; Tensor.to alone costs a quarter of a small F.linear on the host."""
    return bias if bias is None or bias.dtype == dtype else bias.to(dtype)


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """`x [.., K]` as `[M, K]`: a view wherever its leading dims can be merged, a column view included."""
    # reshape cannot infer the -1 of a tensor without elements.
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    """Whether autograd records an operation on these tensors."""
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
