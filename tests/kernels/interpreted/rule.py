"""How far a kernel may be from float64, and inputs in which a stray read or write shows."""

from collections.abc import Callable
from typing import Any

import torch

# Wider than any interpreted tile, and a multiple of 16 bytes, so that a framed tensor takes a TMA descriptor.
MARGIN = 72


def ulp(exact: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance between neighbours of `dtype` at each value."""
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(exact.abs().clamp_min(info.tiny))
    return info.eps * torch.ldexp(torch.ones_like(exact), exponent - 1)


def check(got: torch.Tensor, own: torch.Tensor, exact: torch.Tensor) -> None:
    """Every element within twice torch's `own` largest error, plus one ulp, of the `exact` float64 value."""
    assert (got.shape, got.dtype) == (own.shape, own.dtype)
    assert exact.dtype == torch.float64
    if not got.numel():
        return
    allowed = 2 * (own.double() - exact).abs().max() + ulp(exact, got.dtype)
    error = (got.double() - exact).abs()
    # A NaN is not within any bound.
    assert bool((error <= allowed).all()), f"off by {float(error.max())}, allowed {float(allowed.min())}"


def agree(kernel: Callable[..., Any], twin: Callable[..., Any], *tensors: torch.Tensor | None) -> None:
    """Checks `kernel` against `twin` in float64, by the error of `twin` in the tensors' own dtype."""
    wide = [None if tensor is None else tensor.double() for tensor in tensors]
    # torch's bfloat16 GEMM for AMX reads beside a view, times zero: NaN there becomes its result.
    alone = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    got, own, exact = kernel(*tensors), twin(*alone), twin(*wide)
    for triple in zip(*(each if isinstance(each, tuple) else (each,) for each in (got, own, exact)), strict=True):
        check(*triple)


def agree_gradients(loss: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> None:
    """Checks the gradients of `loss(backend, *tensors)` by Triton against float64, by the error of the torch twin."""

    def gradients(backend: str, dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        loss(backend, *leaves).backward()
        return [leaf.grad for leaf in leaves]

    dtype = tensors[0].dtype
    ways = gradients("triton", dtype), gradients("torch", dtype), gradients("torch", torch.float64)
    for triple in zip(*ways, strict=True):
        check(*triple)


def draw(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal values, divided by the root of the last extent in a weight: a view with NaN on all sides."""
    generator = torch.Generator().manual_seed(seed)
    return framed(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))


def layer(
    rows: int, width: int, depth: int, dtype: torch.dtype, bias: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """`x [rows, depth]`, `weight [width, depth]` that keeps activations near 1, and a bias if it has a dtype."""
    weight = draw(width, depth, dtype=dtype, seed=1).mul_(max(depth, 1) ** -0.5)
    return draw(rows, depth, dtype=dtype), weight, None if bias is None else draw(width, dtype=bias, seed=2)


# (rows, width, depth) against interpreted tiles of 32 x 64 x 32, two of them in a group along the rows.
SHAPES = {
    "one element": (1, 1, 1),
    "one row": (1, 70, 45),
    "no rows": (0, 40, 33),
    "no depth": (3, 5, 0),
    "ragged": (37, 70, 45),
    "whole tiles": (32, 64, 64),
    "groups of tiles": (100, 130, 33),
}


def framed(values: torch.Tensor, fill: float = float("nan")) -> torch.Tensor:
    """`values` as a view into a buffer of `fill`, with `MARGIN` entries of it on each side of each dim."""
    buffer = values.new_full([extent + 2 * MARGIN for extent in values.shape[-2:]], fill)
    if values.dim() > 2:
        buffer = buffer.expand(*values.shape[:-2], *buffer.shape).clone()
    view = buffer[..., MARGIN : MARGIN + values.shape[-1]]
    view = view[..., MARGIN : MARGIN + values.shape[-2], :] if values.dim() > 1 else view
    return view.copy_(values)


def surrounded(view: torch.Tensor, fill: float = float("nan")) -> bool:
    """Whether the frame of a `framed` 2-D view is still intact."""
    extents = [extent + 2 * MARGIN for extent in view.shape]
    buffer = view.as_strided(extents, view.stride(), 0).clone()
    buffer[MARGIN:-MARGIN, MARGIN:-MARGIN] = fill
    return bool(torch.isnan(buffer).all()) if fill != fill else bool((buffer == fill).all())
