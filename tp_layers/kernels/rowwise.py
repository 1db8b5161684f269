"""Rowwise partial sum: `y = x @ weight.T (+ bias on one rank)` on one rank's columns of the full weight.

    x       [.., K / size]  this rank's part of the input, any strides; or several inputs, which meet the weight's
                            columns in turn, as if concatenated
    weight  [N, K / size]   or the full weight, with the `ranges` of its columns that the inputs meet
    bias    [N]             or None, any dtype; whole on every rank
    y       [.., N]         contiguous: the all-reduce takes it in place; the sum over ranks is the layer's output

The dtype rule is `F.linear`'s: one dtype in and out, float32 inside, rounded once; `out_dtype` float32 leaves the sum
unrounded, for a reduction in float32.

The bias enters the sum on the one rank that is told to add it: a share of `bias / size` on each rank would be rounded
`size` times (at size 3 in bfloat16 the sum of the shares is not the bias). Every rank still receives the bias's
gradient, so that the copies stay equal in training.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from . import backend as backends
from . import ops
from .contract import Ranges, as_rows, cast, check_linear, check_ranges, in_turn, needs_grad

Inputs = torch.Tensor | Sequence[torch.Tensor]


class _Rowwise(torch.autograd.Function):
    """Forward `run(xs, weight, bias or None)`; backward torch matmuls, the bias's gradient on every rank."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[..., torch.Tensor],
        add_bias: bool,
        columns: list[tuple[int, int]],
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        *xs: torch.Tensor,
    ) -> Any:
        ctx.save_for_backward(weight, *xs)
        ctx.columns = columns
        ctx.bias_dtype = None if bias is None else bias.dtype
        # F.linear may return a view of a 2-D product, which the caller could not change in place.
        return run(xs, weight, bias if add_bias else None).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        weight, *xs = ctx.saved_tensors
        _, _, _, need_weight, need_bias, *need_xs = ctx.needs_input_grad
        rows = as_rows(grad)
        grad_bias = rows.sum(0).to(ctx.bias_dtype) if need_bias else None
        # The narrower of the two: under autocast the gradient is narrower than the weight, and with a float32 result
        # it is wider.
        dtype = min(weight.dtype, grad.dtype, key=lambda dtype: dtype.itemsize)
        grad, rows, weight = grad.to(dtype), rows.to(dtype), weight.to(dtype)
        grad_xs = [
            grad @ weight[:, start:stop] if need else None
            for need, (start, stop) in zip(need_xs, ctx.columns, strict=True)
        ]
        grad_weight = torch.zeros_like(weight) if need_weight else None
        if grad_weight is not None:
            for x, (start, stop) in zip(xs, ctx.columns, strict=True):
                grad_weight[:, start:stop] = rows.t() @ as_rows(x).to(dtype)
        return None, None, None, grad_weight, grad_bias, *grad_xs


def rowwise(
    x: Inputs,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    add_bias: bool = True,
    *,
    ranges: Ranges | None = None,
    out: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The partial sum of the module docstring, with `bias` in it if `add_bias`, differentiable.

    Args:
        x: one input `[.., K_i]`, or several of the same leading shape.
        ranges: (start, stop) columns of `weight`; by default those of the inputs, in turn. One `x` with several
            ranges is cut into views at their widths.
        out: `[.., N]` of any row stride, written and returned; not under autograd.
        out_dtype: of the result, by default that of `x`.
        backend: "auto", "triton" or "torch"; None for the process's default.

    Raises:
        ValueError: widths, shapes, dtypes or devices do not fit, or `backend` cannot run.
    """
    if isinstance(x, torch.Tensor) and ranges is None and out is None and out_dtype is None:
        # What follows comes to this too, but for a small layer the host would take three times as long.
        plain = x.shape[-1] == weight.shape[1] and not needs_grad(x, weight, bias)
        if plain and backends.choose("rowwise", x, backend) == "torch":
            return rowwise_reference(x, weight, bias if add_bias else None)
    xs, columns = _inputs(x, weight, ranges)
    if out is not None:
        shape = (*xs[0].shape[:-1], weight.shape[0])
        if out.shape != shape or out.dtype != (out_dtype or out.dtype):
            raise ValueError(
                f"out is {out.dtype} of shape {tuple(out.shape)}, the result {out_dtype or out.dtype} of shape {shape}"
            )
    operation = "rowwise" if len(xs) == 1 else "packed_rowwise"
    implementation = _triton if backends.choose(operation, xs[0], backend) == "triton" else _torch

    def run(xs: Sequence[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return implementation(xs, weight, bias, columns, out, out_dtype)

    if needs_grad(*xs, weight, bias):
        if out is not None:
            raise ValueError("out= is not differentiable: call without it, or under torch.no_grad()")
        return _Rowwise.apply(run, add_bias, columns, weight, bias, *xs)
    return run(xs, weight, bias if add_bias else None)


def _inputs(x: Inputs, weight: torch.Tensor, ranges: Ranges | None) -> tuple[list[torch.Tensor], list[tuple[int, int]]]:
    """The inputs, and the weight's columns that each of them meets."""
    xs = [x] if isinstance(x, torch.Tensor) else list(x)
    width = sum(x.shape[-1] for x in xs)
    if ranges is None:
        if width != weight.shape[1]:
            raise ValueError(f"x has {width} columns, the weight {weight.shape[1]}")
        ends = [0]
        for part in xs:
            ends.append(ends[-1] + part.shape[-1])
        columns = list(itertools.pairwise(ends))
    else:
        columns = check_ranges(ranges, weight.shape[1], "columns")
        widths = [stop - start for start, stop in columns]
        if len(xs) == 1 and len(columns) > 1 and sum(widths) == width:
            xs = list(xs[0].split(widths, -1))
        if [part.shape[-1] for part in xs] != widths:
            raise ValueError(
                f"x has {[part.shape[-1] for part in xs]} columns, the ranges {columns} of the weight {widths}"
            )
    return xs, columns


def _triton(
    xs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: Sequence[tuple[int, int]],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    check_linear(xs, weight, bias)
    starts = [start for start, _ in columns]
    if out is None:
        return ops.rowwise(xs, weight, bias, starts, out_dtype)
    ops.rowwise_out(xs, weight, bias, starts, out)
    return out


def _torch(
    xs: Sequence[torch.Tensor],
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    columns: Sequence[tuple[int, int]],
    out: torch.Tensor | None,
    out_dtype: torch.dtype | None,
) -> torch.Tensor:
    if not in_turn(columns, weight.shape[1]):
        weight = torch.cat([weight[:, start:stop] for start, stop in columns], -1)
    if out is None and out_dtype in (None, xs[0].dtype):
        return rowwise_reference(xs, weight, bias)
    out = _empty(xs[0], weight, out_dtype) if out is None else out
    x = as_rows(xs[0] if len(xs) == 1 else torch.cat(list(xs), -1))
    rows = out.view(x.shape[0], weight.shape[0])
    if out.dtype == x.dtype:
        # cuBLAS writes to where the all-reduce reads, bias included.
        if bias is None:
            torch.mm(x, weight.t(), out=rows)
        else:
            torch.addmm(bias.to(x.dtype), x, weight.t(), out=rows)
    elif x.is_cuda and out.dtype == torch.float32:
        rows.copy_(torch.mm(x, weight.t(), out_dtype=torch.float32))
        if bias is not None:
            rows += bias
    else:
        # Autocast would narrow the operands again.
        with torch.autocast(x.device.type, enabled=False):
            rows.copy_(rowwise_reference(x.to(out.dtype), weight.to(out.dtype), bias))
    return out


def _empty(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=dtype or x.dtype)


def rowwise_reference(x: Inputs, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """One rank's partial sum in plain torch and in the dtype it is given; several inputs are concatenated."""
    if not isinstance(x, torch.Tensor):
        x = x[0] if len(x) == 1 else torch.cat(list(x), -1)
    return F.linear(x, weight, cast(bias, x.dtype)).contiguous()
