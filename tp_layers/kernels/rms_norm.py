"""RMSNorm across ranks, in its two halves around the all-reduce.

    x        [.., D / size]  this rank's channels
    squares  [.., 1]         float32 (float64 for float64): the sum of squares, local, then summed over the ranks
    weight   [D / size]      or None
    bias     [D / size]      or None
    y        [.., D / size] = x * rsqrt(squares / D + eps) * weight + bias

The squares are summed, reduced and normalised in float32 whatever the dtype: in bfloat16 the sum of 4096 squares has
no bit left below 16. `torch.nn.RMSNorm` rounds once, after the weight; diffusers' own RMSNorm rounds the normalised
value to the weight's dtype first (`round_first`), and a sharded norm rounds as the one it replaces.
"""

import torch


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """This rank's sum of squares over the last dim, `[.., 1]`, contiguous."""
    return x.to(_wide(x.dtype)).pow(2).sum(-1, keepdim=True).contiguous()


def scale(
    x: torch.Tensor,
    squares: torch.Tensor,
    width: int,
    eps: float,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    round_first: bool = False,
) -> torch.Tensor:
    """Normalises `x` by the `squares` of all ranks, over the full `width` D."""
    y = x.to(_wide(x.dtype)) * torch.rsqrt(squares / width + eps)
    dtype = x.dtype
    if round_first and weight is not None:
        y = y.to(weight.dtype)
        dtype = torch.promote_types(y.dtype, weight.dtype)
    if weight is not None:
        y = y * weight
    if bias is not None:
        y = y + bias
    return y.to(dtype)


def rms_norm_reference(
    x: torch.Tensor, eps: float, weight: torch.Tensor | None = None, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The norm of a whole `x [.., D]` on one rank, in plain torch and in the dtype it is given."""
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias
