"""Rowwise partial sum: `y = x @ weight.T (+ bias on one rank)` on one rank's columns of the full weight.

    x       [.., K / size]  this rank's part of the input; any strides
    weight  [N, K / size]
    bias    [N]             or None; whole on every rank
    y       [.., N]         contiguous: the all-reduce takes it in place; the sum over ranks is the layer's output

The bias enters the sum on the one rank that is told to add it: a share of `bias / size` on each rank would be rounded
`size` times (at size 3 in bfloat16 the sum of the shares is not the bias). Every rank still receives the bias's
gradient, so that the copies stay equal in training.
"""

from typing import Any

import torch
import torch.nn.functional as F


class _Rowwise(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, add_bias: bool) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        # F.linear may return a view of a 2-D product, which the caller could not change in place.
        return rowwise_reference(x, weight, bias if add_bias else None).detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        # Under autocast the product was taken, and its gradient comes, in a narrower dtype than the parameters'.
        x, weight = (saved.to(grad.dtype) for saved in ctx.saved_tensors)
        rows = grad.reshape(-1, grad.shape[-1])
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        grad_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        grad_bias = rows.sum(0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None


def rowwise(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, add_bias: bool = True
) -> torch.Tensor:
    """The partial sum of the module docstring, with `bias` in it if `add_bias`, differentiable.

    Raises:
        ValueError: the widths of `x` and `weight` differ.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}")
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return _Rowwise.apply(x, weight, bias, add_bias)
    return rowwise_reference(x, weight, bias if add_bias else None)


def rowwise_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """One rank's partial sum in plain torch and in the dtype it is given."""
    return F.linear(x, weight, bias).contiguous()
