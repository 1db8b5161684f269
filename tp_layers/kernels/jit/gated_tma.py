"""Gated colwise projection through TMA, for sm_90 and later: `y = act(gate) * up` of `gated.py`.

    x        [M, K]    bfloat16 or float16, rows contiguous and 16-byte aligned, K a multiple of BLOCK_K
    weight   [.., K]   the same; the gate is its rows from `gate`, up its rows from `up`, N of each
    bias               or None, any dtype, cut as the weight
    y        [M, N]    any strides

float32 inside, rounded once, after the product. One program per SM walks the tiles, each from two accumulators that
share the tiles of x.
"""

# A jit function's parameters are Triton values, which have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..configs import Tile
from .launch import Launch, gemm_options, tiles
from .tiles import activate, tile_of


@triton.jit(do_not_specialize=["M"])
def gated_tma_kernel(
    x_desc,
    w_desc,
    b_ptr,
    y_ptr,
    M,
    N,
    K,
    gate,
    up,
    stride_ym,
    stride_yn,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    n_tiles = tl.cdiv(N, BLOCK_N)
    # Not flattened: that serialises the two products.
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * n_tiles, tl.num_programs(0)):
        pid_m, pid_n = tile_of(tile, M, n_tiles, BLOCK_M, GROUP_M)
        row, column = pid_m * BLOCK_M, pid_n * BLOCK_N
        gate_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up_acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x = x_desc.load([row, k])
            gate_acc = tl.dot(x, w_desc.load([gate + column, k]).T, gate_acc)
            up_acc = tl.dot(x, w_desc.load([up + column, k]).T, up_acc)
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_n = column + tl.arange(0, BLOCK_N)
        if b_ptr is not None:
            gate_acc += tl.load(b_ptr + gate + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
            up_acc += tl.load(b_ptr + up + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        y = activate(gate_acc, ACTIVATION) * up_acc
        y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :] * stride_yn
        tl.store(y_ptrs, y.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def gated_tma_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    gate: int,
    up: int,
    activation: str,
    tile: Tile,
    programs: int,
) -> Launch:
    """The launch of at most `programs` programs that writes `y`, of tensors that `takes_tma` accepts."""
    rows, width = y.shape
    arguments = {
        "x_desc": TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        "w_desc": TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        "b_ptr": bias,
        "y_ptr": y,
        "M": rows,
        "N": width,
        "K": x.shape[1],
        "gate": gate,
        "up": up,
        "stride_ym": y.stride(0),
        "stride_yn": y.stride(1),
        "ACTIVATION": activation,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
    }
    return Launch(gated_tma_kernel, (min(programs, tiles(rows, tile, width)),), arguments, gemm_options(tile))
