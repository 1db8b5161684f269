"""Packed colwise projection: `y_i = act_i(x @ weight[rows_i].T + bias[rows_i])` for each block i.

    x        [M, K]    bfloat16, float16 or float32, any strides
    weight   [N, K]    the dtype of x; block i is its rows `starts_i` to `starts_i + widths_i`: of a local shard, or of
                       the full packed weight in place
    bias     [N]       or None, any dtype, cut as the weight
    y_i      [M, widths_i]   a tensor each, or column views of one; any strides

float32 inside, rounded once, after the activation. One program computes one tile of one block, all blocks in one
launch. Bound by the tensor cores from a few hundred rows on, by reading the weight below that.
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
from .tiles import accumulate, activate, tile_of


@triton.jit
def tiles_of(widths, BLOCK_N: tl.constexpr):
    """How many tiles along N cover the blocks."""
    n_tiles = 0
    for i in tl.static_range(len(widths)):
        n_tiles += tl.cdiv(widths[i], BLOCK_N)
    return n_tiles


@triton.jit
def block_of(pid_n, starts, widths, y_ptrs, strides_ym, strides_yn, BLOCK_N: tl.constexpr):
    """The block of tile `pid_n`: its index, its first tile, its start, its width, and where its output goes.

    It is the last block that starts at or before the tile.
    """
    block, first, before = 0, 0, tl.cdiv(widths[0], BLOCK_N)
    start, N, y_ptr, stride_ym, stride_yn = starts[0], widths[0], y_ptrs[0], strides_ym[0], strides_yn[0]
    for i in tl.static_range(1, len(widths)):
        inside = pid_n >= before
        block = tl.where(inside, i, block)
        first = tl.where(inside, before, first)
        start = tl.where(inside, starts[i], start)
        N = tl.where(inside, widths[i], N)
        y_ptr = tl.where(inside, y_ptrs[i], y_ptr)
        stride_ym = tl.where(inside, strides_ym[i], stride_ym)
        stride_yn = tl.where(inside, strides_yn[i], stride_yn)
        before += tl.cdiv(widths[i], BLOCK_N)
    return block, first, start, N, y_ptr, stride_ym, stride_yn


@triton.jit
def activate_block(acc, block, ACTIVATIONS: tl.constexpr):
    """The activation of the block with this index: a branch of the program for each block that has one."""
    for i in tl.static_range(len(ACTIVATIONS)):
        if ACTIVATIONS[i] is not None:  # noqa: SIM102 - the compiler decides the first, the program the second
            if block == i:
                # Triton 3.6 takes the entry out of a constexpr tuple bare.
                acc = activate(acc, tl.constexpr(ACTIVATIONS[i]))
    return acc


@triton.jit(do_not_specialize=["M"])
def colwise_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptrs,
    M,
    K,
    starts,
    widths,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    strides_ym,
    strides_yn,
    ACTIVATIONS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    pid_m, pid_n = tile_of(tl.program_id(0), M, tiles_of(widths, BLOCK_N), BLOCK_M, GROUP_M)
    block, first, start, N, y_ptr, stride_ym, stride_yn = block_of(
        pid_n, starts, widths, y_ptrs, strides_ym, strides_yn, BLOCK_N
    )
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid_n - first) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    # Rows past the end read row 0 on: no mask in the loop, and their results are not stored.
    x = x_ptr + (offs_m % M).to(tl.int64)[:, None] * stride_xm + offs_k[None, :] * stride_xk
    w = w_ptr + (start + offs_n % N).to(tl.int64)[None, :] * stride_wn + offs_k[:, None] * stride_wk

    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    acc = accumulate(acc, x, w, K, stride_xk, stride_wk, BLOCK_K, EVEN_K, PRECISION)
    if b_ptr is not None:
        acc += tl.load(b_ptr + start + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
    acc = activate_block(acc, block, ACTIVATIONS)

    y = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :] * stride_yn
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def colwise_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ys: Sequence[torch.Tensor],
    starts: Sequence[int],
    activations: Sequence[str | None],
    tile: Tile,
) -> Launch:
    """The launch that writes `ys`; every tensor is 2-D but the bias, whose shapes the caller has checked."""
    rows, depth = x.shape
    widths = tuple(y.shape[1] for y in ys)
    arguments = {
        "x_ptr": x,
        "w_ptr": weight,
        "b_ptr": bias,
        "y_ptrs": tuple(ys),
        "M": rows,
        "K": depth,
        "starts": tuple(starts),
        "widths": widths,
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_wn": weight.stride(0),
        "stride_wk": weight.stride(1),
        "strides_ym": tuple(y.stride(0) for y in ys),
        "strides_yn": tuple(y.stride(1) for y in ys),
        "ACTIVATIONS": tuple(activations),
        **gemm_arguments(tile, weight.dtype, (depth,)),
    }
    return Launch(colwise_kernel, (tiles(rows, tile, *widths),), arguments, gemm_options(tile))
