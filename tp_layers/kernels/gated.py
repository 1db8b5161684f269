"""Gated colwise projection: `y = act(gate) * up` of the two blocks of a packed projection (SwiGLU, GEGLU).

    x       [.., K]            whole: the same on every rank
    weight  [2 * N / size, K]  this rank's part of [gate | up], or of [up | gate]; or the full packed weight, with the
                               `ranges` of its rows that are this rank's
    bias    [2 * N / size]     or None, any dtype; cut as the weight
    y       [.., N / size]

One dtype in and out, float32 inside, rounded once, after the product (the torch twin rounds the projection, the
activation and the product).
"""

import torch

from . import backend as backends
from . import ops
from .autograd import Twin
from .colwise import ACTIVATIONS, colwise_reference
from .contract import Ranges, check_linear, check_ranges, in_one_run, needs_grad


def gated_colwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "silu",
    gate_first: bool = True,
    ranges: Ranges | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The projection of the module docstring, differentiable.

    Args:
        activation: of the gate: "gelu" (erf), "gelu_tanh" or "silu".
        gate_first: whether the weight is [gate | up].
        ranges: (start, stop) rows of `weight` of the two blocks, in the weight's order; by default its halves.
        backend: "auto", "triton" or "torch"; None for the process's default.

    Raises:
        ValueError: widths, shapes, dtypes or devices do not fit, the activation is unknown, or `backend` cannot run.
    """
    half, odd = divmod(weight.shape[0], 2)
    if ranges is None and odd:
        raise ValueError(f"the weight has {weight.shape[0]} rows, which are not two equal blocks")
    rows = check_ranges(((0, half), (half, 2 * half)) if ranges is None else ranges, weight.shape[0], "rows")
    if len({stop - start for start, stop in rows}) != 1 or len(rows) != 2:
        raise ValueError(f"a gated projection has two blocks of equal width, not {rows}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")

    def twin(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        run = in_one_run(rows)
        if run is not None:
            start, stop = run
            bias = None if bias is None else bias[start:stop]
            return gated_reference(x, weight[start:stop], bias, activation, gate_first)
        weight = torch.cat([weight[start:stop] for start, stop in rows])
        bias = None if bias is None else torch.cat([bias[start:stop] for start, stop in rows])
        return gated_reference(x, weight, bias, activation, gate_first)

    if backends.choose("gated_colwise", x, backend) == "torch":
        return twin(x, weight, bias)

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return _triton(x, weight, bias, rows, activation, gate_first)

    if needs_grad(x, weight, bias):
        return Twin.apply(kernel, twin, x, weight, bias)
    return kernel(x, weight, bias)


def _triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rows: list[tuple[int, int]],
    activation: str,
    gate_first: bool,
) -> torch.Tensor:
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}")
    check_linear([x], weight, bias)
    (first, stop), (second, _) = rows
    gate, up = (first, second) if gate_first else (second, first)
    return ops.gated(x, weight, bias, gate, up, stop - first, activation)


def gated_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str = "silu",
    gate_first: bool = True,
) -> torch.Tensor:
    """`gated_colwise` of the weight's halves in plain torch and in the dtype it is given."""
    first, second = colwise_reference(x, weight, bias).chunk(2, -1)
    gate, up = (first, second) if gate_first else (second, first)
    return ACTIVATIONS[activation](gate) * up
