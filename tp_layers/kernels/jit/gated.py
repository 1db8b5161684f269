"""Gated colwise projection: `y = act(gate) * up`, with `gate` and `up` the two blocks of a packed projection.

    x        [M, K]    bfloat16, float16 or float32, any strides
    weight   [.., K]   the dtype of x; the gate is its rows from `gate`, up its rows from `up`, N of each
    bias               or None, any dtype, cut as the weight
    y        [M, N]    any strides

float32 inside, rounded once, after the product. One program computes one tile of y from two accumulators that share
the tiles of x. Bound by the tensor cores from a few hundred rows on, by reading the weight below that.
"""

# A jit function's parameters are Triton values, which have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl

from ..configs import Tile
from .launch import Launch, gemm_arguments, gemm_options, tiles
from .tiles import activate, tile_of


@triton.jit(do_not_specialize=["M"])
def gated_kernel(
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    M,
    N,
    K,
    gate,
    up,
    stride_xm,
    stride_xk,
    stride_wn,
    stride_wk,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
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
    x_ptrs = x_ptr + (offs_m % M).to(tl.int64)[:, None] * stride_xm + offs_k[None, :] * stride_xk
    w_cols = w_ptr + offs_k[:, None] * stride_wk
    gate_ptrs = w_cols + (gate + offs_n % N).to(tl.int64)[None, :] * stride_wn
    up_ptrs = w_cols + (up + offs_n % N).to(tl.int64)[None, :] * stride_wn

    gate_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    # At least one step: ptxas of triton 3.6 serialises every wgmma of a loop that may take none (note C7515).
    for k in range(0, tl.maximum(tl.cdiv(K, BLOCK_K), 1)):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w_gate = tl.load(gate_ptrs)
            w_up = tl.load(up_ptrs)
        else:
            left = K - k * BLOCK_K
            x = tl.load(x_ptrs, mask=offs_k[None, :] < left, other=0.0)
            w_gate = tl.load(gate_ptrs, mask=offs_k[:, None] < left, other=0.0)
            w_up = tl.load(up_ptrs, mask=offs_k[:, None] < left, other=0.0)
        gate_acc = tl.dot(x, w_gate, gate_acc, input_precision=PRECISION)
        up_acc = tl.dot(x, w_up, up_acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K * stride_xk
        gate_ptrs += BLOCK_K * stride_wk
        up_ptrs += BLOCK_K * stride_wk
    if b_ptr is not None:
        gate_acc += tl.load(b_ptr + gate + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        up_acc += tl.load(b_ptr + up + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]

    y = activate(gate_acc, ACTIVATION) * up_acc
    y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :] * stride_yn
    tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def gated_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    gate: int,
    up: int,
    activation: str,
    tile: Tile,
) -> Launch:
    """The launch that writes `y`; every tensor is 2-D but the bias, whose shapes the caller has checked."""
    rows, width = y.shape
    depth = x.shape[1]
    arguments = {
        "x_ptr": x,
        "w_ptr": weight,
        "b_ptr": bias,
        "y_ptr": y,
        "M": rows,
        "N": width,
        "K": depth,
        "gate": gate,
        "up": up,
        "stride_xm": x.stride(0),
        "stride_xk": x.stride(1),
        "stride_wn": weight.stride(0),
        "stride_wk": weight.stride(1),
        "stride_ym": y.stride(0),
        "stride_yn": y.stride(1),
        "ACTIVATION": activation,
        **gemm_arguments(tile, weight.dtype, (depth,)),
    }
    return Launch(gated_kernel, (tiles(rows, tile, width),), arguments, gemm_options(tile))
