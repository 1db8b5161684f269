"""Colwise projection: `y = x @ weight.T + bias` on one rank's rows of the full weight.

    x       [.., K]        whole: the same on every rank
    weight  [N / size, K]  for a packed projection, this rank's part of each block, one after the other
    bias    [N / size]     or None
    y       [.., N / size]

The dtype rule is `F.linear`'s: one dtype in and out, float32 inside, rounded once.
"""

import torch
import torch.nn.functional as F


def colwise(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """The projection of the module docstring, on the input's own shape, differentiable."""
    return colwise_reference(x, weight, bias)


def colwise_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`colwise` in plain torch and in the dtype it is given."""
    # On the input's own shape: a flattened addmm differs from the unsharded layer's F.linear by rounding.
    return F.linear(x, weight, bias)
