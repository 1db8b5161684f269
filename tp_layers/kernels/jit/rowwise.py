"""Rowwise partial sum: `y = sum_i x_i @ weight[:, columns_i].T + bias`.

    x_i      [M, K_i]  bfloat16, float16 or float32, any strides
    weight   [N, K]    the dtype of x; input i meets its columns `columns_i` to `columns_i + K_i`
    bias     [N]       or None, any dtype
    y        [M, N]    any strides, any dtype: float32 leaves the sum unrounded for the reduction

float32 inside, rounded once. One program computes one tile of y and walks the inputs in turn along K, so that they
need no cat. Bound by the tensor cores from a few hundred rows on, by reading the weight below that.
"""

# A jit function's parameters are Triton values, which have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from ..configs import Tile
from .launch import Launch, gemm_arguments, gemm_options, tiles
from .tiles import accumulate, tile_of


@triton.jit(do_not_specialize=["M"])
def rowwise_kernel(
    x_ptrs,
    w_ptr,
    b_ptr,
    y_ptr,
    M,
    N,
    Ks,
    columns,
    strides_xm,
    strides_xk,
    stride_wn,
    stride_wk,
    stride_ym,
    stride_yn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid_m, pid_n = tile_of(tl.program_id(0), M, tl.cdiv(N, BLOCK_N), BLOCK_M, GROUP_M)
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # Rows past the end read row 0 on: no mask in the loop, and their results are not stored.
    rows = (offs_m % M).to(tl.int64)[:, None]
    w_rows = w_ptr + (offs_n % N).to(tl.int64)[None, :] * stride_wn

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for i in tl.static_range(len(x_ptrs)):
        x = x_ptrs[i] + rows * strides_xm[i] + offs_k[None, :] * strides_xk[i]
        w = w_rows + (columns[i] + offs_k)[:, None] * stride_wk
        acc = accumulate(acc, x, w, Ks[i], strides_xk[i], stride_wk, BLOCK_K, EVEN_K, PRECISION)
    if b_ptr is not None:
        acc += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]

    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :] * stride_yn
    tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def rowwise_launch(
    xs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    columns: Sequence[int],
    tile: Tile,
) -> Launch:
    """The launch that writes `y`; every tensor is 2-D but the bias, whose shapes the caller has checked."""
    rows, width = y.shape
    depths = tuple(x.shape[1] for x in xs)
    arguments = {
        "x_ptrs": tuple(xs),
        "w_ptr": weight,
        "b_ptr": bias,
        "y_ptr": y,
        "M": rows,
        "N": width,
        "Ks": depths,
        "columns": tuple(columns),
        "strides_xm": tuple(x.stride(0) for x in xs),
        "strides_xk": tuple(x.stride(1) for x in xs),
        "stride_wn": weight.stride(0),
        "stride_wk": weight.stride(1),
        "stride_ym": y.stride(0),
        "stride_yn": y.stride(1),
        **gemm_arguments(tile, weight.dtype, depths),
    }
    return Launch(rowwise_kernel, (tiles(rows, tile, width),), arguments, gemm_options(tile))
