"""RMSNorm across ranks, its two passes over one rank's channels.

    x        [M, D]    bfloat16, float16 or float32, any strides
    squares  [M]       float32: the sum of squares of each row
    weight   [D]       or None, any dtype
    bias     [D]       or None, any dtype
    y        [M, D] = x * rsqrt(squares / width + eps) * weight + bias

float32 inside, rounded once; with ROUND_FIRST rounded to y's dtype after each step, as diffusers' own norm is. One
program takes one row. Bound by reading x.
"""

# A jit function's parameters are Triton values, which have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from ..configs import Row
from .launch import FUSED, Launch


@triton.jit(do_not_specialize=["M"])
def sum_of_squares_kernel(x_ptr, squares_ptr, M, D, stride_xm, stride_xd, BLOCK_D: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    acc = tl.zeros((BLOCK_D,), tl.float32)
    for d in range(0, D, BLOCK_D):
        x = tl.load(x_ptr + row * stride_xm + (d + offs_d) * stride_xd, mask=d + offs_d < D, other=0.0).to(tl.float32)
        acc += x * x
    tl.store(squares_ptr + row, tl.sum(acc, axis=0))


@triton.jit(do_not_specialize=["M"])
def scale_kernel(
    x_ptr,
    squares_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    M,
    D,
    width,
    eps,
    stride_xm,
    stride_xd,
    ROUND_FIRST: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    inverse = tl.rsqrt(tl.load(squares_ptr + row) / width + eps)
    dtype = y_ptr.dtype.element_ty
    for d in range(0, D, BLOCK_D):
        mask = d + offs_d < D
        y = tl.load(x_ptr + row * stride_xm + (d + offs_d) * stride_xd, mask=mask, other=0.0).to(tl.float32) * inverse
        if ROUND_FIRST:
            y = y.to(dtype).to(tl.float32)
        if w_ptr is not None:
            y *= tl.load(w_ptr + d + offs_d, mask=mask, other=0.0).to(tl.float32)
        if ROUND_FIRST:
            y = y.to(dtype).to(tl.float32)
        if b_ptr is not None:
            y += tl.load(b_ptr + d + offs_d, mask=mask, other=0.0).to(tl.float32)
        tl.store(y_ptr + row * D + d + offs_d, y.to(dtype), mask=mask)


def sum_of_squares_launch(x: torch.Tensor, squares: torch.Tensor, step: Row) -> Launch:
    """The launch that writes the contiguous `squares [M]` of `x [M, D]`."""
    rows, width = x.shape
    arguments = {
        "x_ptr": x,
        "squares_ptr": squares,
        "M": rows,
        "D": width,
        "stride_xm": x.stride(0),
        "stride_xd": x.stride(1),
        "BLOCK_D": step.block_d,
    }
    return Launch(sum_of_squares_kernel, (rows,), arguments, {**FUSED, "num_warps": step.num_warps})


def scale_launch(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    width: int,
    eps: float,
    round_first: bool,
    step: Row,
) -> Launch:
    """The launch that writes the contiguous `y [M, D]`."""
    arguments = {
        "x_ptr": x,
        "squares_ptr": squares,
        "w_ptr": weight,
        "b_ptr": bias,
        "y_ptr": y,
        "M": x.shape[0],
        "D": x.shape[1],
        "width": width,
        "eps": eps,
        "stride_xm": x.stride(0),
        "stride_xd": x.stride(1),
        "ROUND_FIRST": round_first,
        "BLOCK_D": step.block_d,
    }
    return Launch(scale_kernel, (x.shape[0],), arguments, {**FUSED, "num_warps": step.num_warps})
