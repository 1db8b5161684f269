"""RMSNorm across ranks, in its two halves around the all-reduce.

    x        [.., D / size]  this rank's channels, any strides
    squares  [.., 1]         float32 (float64 for float64): the sum of squares, local, then summed over the ranks
    weight   [D / size]      or None
    bias     [D / size]      or None
    y        [.., D / size] = x * rsqrt(squares / D + eps) * weight + bias

The squares are summed, reduced and normalised in float32 whatever the dtype: in bfloat16 the sum of 4096 squares has
no bit left below 16. `torch.nn.RMSNorm` rounds once, after the weight; diffusers' own RMSNorm rounds the normalised
value to the weight's dtype first (`round_first`), and a sharded norm rounds as the one it replaces.
"""

import torch

from . import backend as backends
from . import ops
from .autograd import Twin
from .contract import needs_grad


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def sum_of_squares(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """This rank's sum of squares over the last dim, `[.., 1]`, contiguous, differentiable."""
    if backends.choose("sum_of_squares", x, backend) == "torch":
        return sum_of_squares_reference(x)
    if needs_grad(x):
        return Twin.apply(ops.sum_of_squares, sum_of_squares_reference, x)
    return ops.sum_of_squares(x)


def scale(
    x: torch.Tensor,
    squares: torch.Tensor,
    width: int,
    eps: float,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    round_first: bool = False,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Normalises `x` by the `squares` of all ranks, over the full `width` D; differentiable.

    Raises:
        ValueError: for the kernel, `squares` is not float32 with one entry a row, or a parameter's length is not x's.
    """

    def twin(
        x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return scale_reference(x, squares, width, eps, weight, bias, round_first)

    if backends.choose("scale", x, backend) == "torch":
        return twin(x, squares, weight, bias)

    def kernel(
        x: torch.Tensor, squares: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return _scale_triton(x, squares, width, eps, weight, bias, round_first)

    if needs_grad(x, squares, weight, bias):
        return Twin.apply(kernel, twin, x, squares, weight, bias)
    return kernel(x, squares, weight, bias)


def _scale_triton(
    x: torch.Tensor,
    squares: torch.Tensor,
    width: int,
    eps: float,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    round_first: bool,
) -> torch.Tensor:
    if squares.shape != (*x.shape[:-1], 1) or squares.dtype != torch.float32 or not squares.is_contiguous():
        raise ValueError(f"squares of x {tuple(x.shape)} are {squares.dtype} of shape {tuple(squares.shape)}")
    for parameter in (weight, bias):
        if parameter is not None and (parameter.shape != x.shape[-1:] or not parameter.is_contiguous()):
            raise ValueError(f"x has {x.shape[-1]} channels, its weight or bias the shape {tuple(parameter.shape)}")
    return ops.scale(x, squares, weight, bias, width, eps, round_first and weight is not None)


def sum_of_squares_reference(x: torch.Tensor) -> torch.Tensor:
    """`sum_of_squares` in plain torch."""
    return x.to(_wide(x.dtype)).pow(2).sum(-1, keepdim=True).contiguous()


def scale_reference(
    x: torch.Tensor,
    squares: torch.Tensor,
    width: int,
    eps: float,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    round_first: bool = False,
) -> torch.Tensor:
    """`scale` in plain torch."""
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
