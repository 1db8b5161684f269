"""Packed colwise projection through TMA, for sm_90 and later: the projections of `colwise.py`.

    x        [M, K]    bfloat16 or float16, rows contiguous and 16-byte aligned, K a multiple of BLOCK_K
    weight   [N, K]    the same; block i is its rows `starts_i` to `starts_i + widths_i`
    bias     [N]       or None, any dtype, cut as the weight
    y_i      [M, widths_i]   any strides

float32 inside, rounded once, after the activation. One program per SM walks the tiles of all blocks. A block's last
tile may read the rows of the next block, which only enter columns that are not stored.
"""

# A jit function's parameters are Triton values, which have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..configs import Tile
from .colwise import activate_block, block_of, tiles_of
from .launch import Launch, gemm_options, tiles
from .rowwise_tma import accumulate_tma
from .tiles import tile_of


@triton.jit(do_not_specialize=["M"])
def colwise_tma_kernel(
    x_desc,
    w_desc,
    b_ptr,
    y_ptrs,
    M,
    K,
    starts,
    widths,
    strides_ym,
    strides_yn,
    ACTIVATIONS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    n_tiles = tiles_of(widths, BLOCK_N)
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * n_tiles, tl.num_programs(0)):
        pid_m, pid_n = tile_of(tile, M, n_tiles, BLOCK_M, GROUP_M)
        block, first, start, N, y_ptr, stride_ym, stride_yn = block_of(
            pid_n, starts, widths, y_ptrs, strides_ym, strides_yn, BLOCK_N
        )
        row, column = pid_m * BLOCK_M, (pid_n - first) * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc = accumulate_tma(acc, x_desc, w_desc, row, start + column, K, 0, BLOCK_K)
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_n = column + tl.arange(0, BLOCK_N)
        if b_ptr is not None:
            acc += tl.load(b_ptr + start + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        acc = activate_block(acc, block, ACTIVATIONS)
        y = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :] * stride_yn
        tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def colwise_tma_launch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ys: Sequence[torch.Tensor],
    starts: Sequence[int],
    activations: Sequence[str | None],
    tile: Tile,
    programs: int,
) -> Launch:
    """The launch of at most `programs` programs that writes `ys`, of tensors that `takes_tma` accepts."""
    rows, depth = x.shape
    widths = tuple(y.shape[1] for y in ys)
    arguments = {
        "x_desc": TensorDescriptor.from_tensor(x, [tile.block_m, tile.block_k]),
        "w_desc": TensorDescriptor.from_tensor(weight, [tile.block_n, tile.block_k]),
        "b_ptr": bias,
        "y_ptrs": tuple(ys),
        "M": rows,
        "K": depth,
        "starts": tuple(starts),
        "widths": widths,
        "strides_ym": tuple(y.stride(0) for y in ys),
        "strides_yn": tuple(y.stride(1) for y in ys),
        "ACTIVATIONS": tuple(activations),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
    }
    return Launch(colwise_tma_kernel, (min(programs, tiles(rows, tile, *widths)),), arguments, gemm_options(tile))
