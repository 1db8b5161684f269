"""The gradient of a fused kernel: that of its torch twin, on the saved inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


class Twin(torch.autograd.Function):
    """`kernel(*tensors)` forward, the gradient of `twin(*tensors)` backward.

    The twin's forward runs again in the backward pass: a fused kernel never held the values before its activation.
    """

    @staticmethod
    def forward(ctx: Any, kernel: Callable[..., Any], twin: Callable[..., Any], *tensors: torch.Tensor | None) -> Any:
        ctx.twin = twin
        ctx.save_for_backward(*tensors)
        y = kernel(*tensors)
        ctx.several = isinstance(y, tuple)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs, needed = ctx.saved_tensors, ctx.needs_input_grad[2:]

        def twin(*wanted: torch.Tensor) -> Any:
            found = iter(wanted)
            return ctx.twin(*(next(found) if need else x for x, need in zip(inputs, needed, strict=True)))

        # torch.autograd.grad would do, but torch.compile does not trace it.
        pull = torch.func.vjp(twin, *(x for x, need in zip(inputs, needed, strict=True) if need))[1]
        found = iter(pull(grads if ctx.several else grads[0]))
        return None, None, *(next(found) if need else None for need in needed)
