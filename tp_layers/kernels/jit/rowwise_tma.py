"""Rowwise partial sum through TMA, for sm_90: the sums of `rowwise.py`, of one or two inputs.

    x_i      [M, K_i]  bfloat16 or float16, rows contiguous and 16-byte aligned, K_i a multiple of BLOCK_K
    weight   [N, K]    the same; input i meets its columns `columns_i` to `columns_i + K_i`
    bias     [N]       or None, any dtype
    y        [M, N]    any strides, any dtype

float32 inside, rounded once. One program per SM walks the tiles; tiles of x and of the weight come through descriptors
made on the host, which keeps their addresses out of the registers: 128 x 256 fits without a spill. More than two
inputs, or a K that is no multiple of the step, are for the pointer kernel.
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
from .launch import Launch, gemm_options, tiles
from .tiles import tile_of


@triton.jit
def accumulate_tma(acc, x_desc, w_desc, row, w_row, K, column, BLOCK_K: tl.constexpr):
    """`acc += x[row:, :K] @ w[w_row:, column : column + K].T`, tile by tile."""
    for k in range(0, K, BLOCK_K):
        x = x_desc.load([row, k])
        w = w_desc.load([w_row, column + k])
        acc = tl.dot(x, w.T, acc)
    return acc


@triton.jit(do_not_specialize=["M"])
def rowwise_tma_kernel(
    x_desc,
    second_desc,
    w_desc,
    b_ptr,
    y_ptr,
    M,
    N,
    K,
    second_K,
    column,
    second_column,
    stride_ym,
    stride_yn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    FLATTEN: tl.constexpr,
):
    n_tiles = tl.cdiv(N, BLOCK_N)
    # Flattened, the loads of the next tile start before this one is stored.
    for tile in tl.range(tl.program_id(0), tl.cdiv(M, BLOCK_M) * n_tiles, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_of(tile, M, n_tiles, BLOCK_M, GROUP_M)
        row, w_row = pid_m * BLOCK_M, pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        acc = accumulate_tma(acc, x_desc, w_desc, row, w_row, K, column, BLOCK_K)
        if second_desc is not None:
            acc = accumulate_tma(acc, second_desc, w_desc, row, w_row, second_K, second_column, BLOCK_K)
        offs_m = row + tl.arange(0, BLOCK_M)
        offs_n = w_row + tl.arange(0, BLOCK_N)
        if b_ptr is not None:
            acc += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(tl.float32)[None, :]
        y_ptrs = y_ptr + offs_m.to(tl.int64)[:, None] * stride_ym + offs_n[None, :] * stride_yn
        tl.store(y_ptrs, acc.to(y_ptr.dtype.element_ty), mask=(offs_m < M)[:, None] & (offs_n < N)[None, :])


def takes_tma(xs: Sequence[torch.Tensor], weight: torch.Tensor, columns: Sequence[int], tile: Tile) -> bool:
    """Whether descriptors can be made of these tensors, so no rows overlap, and every step along K is whole."""
    return (
        len(xs) <= 2
        and weight.dtype.itemsize == 2
        and all(x.numel() and x.shape[1] % tile.block_k == 0 for x in xs)
        and all(column % 8 == 0 for column in columns)
        and all(t.stride(1) == 1 and t.stride(0) % 8 == 0 and t.data_ptr() % 16 == 0 for t in (*xs, weight))
        and all(t.stride(0) >= t.shape[1] for t in (*xs, weight))
    )


def rowwise_tma_launch(
    xs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    columns: Sequence[int],
    tile: Tile,
    programs: int,
) -> Launch:
    """The launch of at most `programs` programs that writes `y`, of tensors that `takes_tma` accepts."""
    rows, width = y.shape
    x_block, w_block = [tile.block_m, tile.block_k], [tile.block_n, tile.block_k]
    descriptors = [TensorDescriptor.from_tensor(x, x_block) for x in xs]
    arguments = {
        "x_desc": descriptors[0],
        "second_desc": descriptors[1] if len(xs) > 1 else None,
        "w_desc": TensorDescriptor.from_tensor(weight, w_block),
        "b_ptr": bias,
        "y_ptr": y,
        "M": rows,
        "N": width,
        "K": xs[0].shape[1],
        "second_K": xs[-1].shape[1],
        "column": columns[0],
        "second_column": columns[-1],
        "stride_ym": y.stride(0),
        "stride_yn": y.stride(1),
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        # Two loops inside cannot be; and beside the tiles to come, one of 128 x 256 to be stored in float32 would take
        # 327,712 bytes of shared memory, of 232,448.
        "FLATTEN": len(xs) == 1 and y.element_size() == 2,
    }
    return Launch(rowwise_tma_kernel, (min(programs, tiles(rows, tile, width)),), arguments, gemm_options(tile))
