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
        return kernel(*tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        needed = ctx.needs_input_grad[2:]
        inputs = [
            None if tensor is None else tensor.detach().requires_grad_(need)
            for tensor, need in zip(ctx.saved_tensors, needed, strict=True)
        ]
        with torch.enable_grad():
            result = ctx.twin(*inputs)
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(result, wanted, grads))
        return None, None, *(next(found) if need else None for need in needed)
