"""What the GEMM kernels share: the order of the tiles, the loop over K, the activations."""

# A jit function's parameters are Triton values, which have no Python types.
# ruff: noqa: ANN001, ANN201
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def tile_of(pid, M, n_tiles, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """Program `pid`'s tile along M and along N: `GROUP_M` tiles of M before the next of N, for the L2 cache."""
    m_tiles = tl.cdiv(M, BLOCK_M)
    group = GROUP_M * n_tiles
    first = pid // group * GROUP_M
    rows = tl.minimum(m_tiles - first, GROUP_M)
    return first + pid % group % rows, pid % group // rows


@triton.jit
def accumulate(
    acc,
    x_ptrs,
    w_ptrs,
    K,
    stride_xk,
    stride_wk,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`acc [BLOCK_M, BLOCK_N] += x [BLOCK_M, K] @ w [K, BLOCK_N]`, from pointers to the first step's tiles."""
    offs_k = tl.arange(0, BLOCK_K)
    # At least one step: ptxas of triton 3.6 serialises every wgmma of a loop that may take none (note C7515).
    for k in range(0, tl.maximum(tl.cdiv(K, BLOCK_K), 1)):
        if EVEN_K:
            x = tl.load(x_ptrs)
            w = tl.load(w_ptrs)
        else:
            x = tl.load(x_ptrs, mask=offs_k[None, :] < K - k * BLOCK_K, other=0.0)
            w = tl.load(w_ptrs, mask=offs_k[:, None] < K - k * BLOCK_K, other=0.0)
        acc = tl.dot(x, w, acc, input_precision=PRECISION)
        x_ptrs += BLOCK_K * stride_xk
        w_ptrs += BLOCK_K * stride_wk
    return acc


@triton.jit
def activate(y, ACTIVATION: tl.constexpr):
    """The activation of a float32 tile; None for none."""
    if ACTIVATION == "gelu_tanh":
        # (1 + tanh u) / 2 is sigmoid(2 u); tanh itself is only in libdevice, which the interpreter lacks.
        y = y * tl.sigmoid(1.5957691216057308 * (y + 0.044715 * y * y * y))
    elif ACTIVATION == "gelu":
        y = 0.5 * y * (1 + tl.erf(y * 0.7071067811865476))
    elif ACTIVATION == "silu":
        y = y * tl.sigmoid(y)
    return y
