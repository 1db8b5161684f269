"""A kernel with everything one launch of it needs: run on a GPU, interpreted, or compiled ahead of time."""

from typing import Any, NamedTuple

import torch
import triton

from ..configs import Tile

# Multiply-adds are contracted: said here because triton 3.9 warns where it is not, and 3.10 turns it off.
FUSED = {"enable_fp_fusion": True}


class Launch(NamedTuple):
    """`arguments` are the kernel's parameters by name, `options` the compiler's (num_warps, num_stages)."""

    kernel: Any
    grid: tuple[int]
    arguments: dict[str, Any]
    options: dict[str, Any]

    def run(self, device: torch.device) -> None:
        """Launches on `device`'s current stream; an empty grid launches nothing."""
        if self.grid[0] == 0:
            return
        if device.type == "cuda":
            # Triton launches on the current device, whatever its arguments are on.
            with torch.cuda.device(device):
                self.kernel[self.grid](**self.arguments, **self.options)
        else:
            self.kernel[self.grid](**self.arguments, **self.options)


def gemm_arguments(tile: Tile, dtype: torch.dtype, depths: tuple[int, ...]) -> dict[str, Any]:
    """The constexprs that all GEMM kernels share, for sums over each of `depths`."""
    return {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "GROUP_M": tile.group_m,
        # A sum over nothing still takes one step, all of it masked.
        "EVEN_K": all(depth > 0 and depth % tile.block_k == 0 for depth in depths),
        # The default would round float32 operands to tf32, 10 bits of mantissa.
        "PRECISION": "ieee" if dtype == torch.float32 else None,
    }


def gemm_options(tile: Tile) -> dict[str, Any]:
    """The compiler's options of a GEMM."""
    return {**FUSED, "num_warps": tile.num_warps, "num_stages": tile.num_stages}


def tiles(rows: int, tile: Tile, *widths: int) -> int:
    """How many output tiles cover `rows` by each of `widths`: no tile spans two of them."""
    return triton.cdiv(rows, tile.block_m) * sum(triton.cdiv(width, tile.block_n) for width in widths)
