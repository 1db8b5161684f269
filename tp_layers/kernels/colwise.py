"""Colwise projection: `y = x @ weight.T + bias` on one rank's rows of the full weight.

    x       [.., K]        whole: the same on every rank
    weight  [N / size, K]  for a packed projection, this rank's part of each block, one after the other; or the full
                           packed weight, with the `ranges` of its rows that are this rank's
    bias    [N / size]     or None, any dtype; cut as the weight
    y       [.., N / size] the blocks side by side; or a tensor for each block, with its activation

The dtype rule is `F.linear`'s: one dtype in and out, float32 inside, rounded once (by the torch twin, once more after
the activation).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from . import backend as backends
from . import ops
from .autograd import Twin
from .contract import Ranges, cast, check_linear, check_ranges, in_one_run, in_turn, needs_grad

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}
Rows = Sequence[tuple[int, int]]
Activations = Sequence[str | None]


def colwise(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ranges: Ranges | None = None,
    activations: Activations | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """The projection of the module docstring, the blocks side by side in one tensor, differentiable.

    Args:
        ranges: (start, stop) rows of `weight`, one for each block; by default one block, the whole weight.
        activations: "gelu" (erf), "gelu_tanh", "silu" or None for each block; by default none.
        backend: "auto", "triton" or "torch"; None for the process's default.

    Raises:
        ValueError: widths, shapes, dtypes or devices do not fit, an activation is unknown, or `backend` cannot run.
    """
    if ranges is None and activations is None and backends.choose("colwise", x, backend) == "torch":
        # What follows comes to this too, but for a small layer the host would take twice as long.
        return colwise_reference(x, weight, bias)
    rows, acts = _blocks(weight, ranges, activations)
    operation = "colwise" if in_turn(rows, weight.shape[0]) and not any(acts) else "packed_colwise"

    def twin(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if operation == "colwise":
            return colwise_reference(x, weight, bias)
        ys = _torch(x, weight, bias, rows, acts)
        return ys[0] if len(ys) == 1 else torch.cat(ys, -1)

    if backends.choose(operation, x, backend) == "torch":
        return twin(x, weight, bias)

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return ops.colwise(*_arguments(x, weight, bias, rows, acts))

    if needs_grad(x, weight, bias):
        return Twin.apply(kernel, twin, x, weight, bias)
    return kernel(x, weight, bias)


def colwise_blocks(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    ranges: Ranges,
    activations: Activations | None = None,
    backend: str | None = None,
    contiguous: bool = True,
) -> tuple[torch.Tensor, ...]:
    """As `colwise`, but a tensor for each block: contiguous, or (False) a column view of one output where that is free.

    Without activations, the views are of a bare GEMM, for which "auto" takes the backend that it takes for one.
    """
    rows, acts = _blocks(weight, ranges, activations)
    run = in_one_run(rows)
    if run is not None and not contiguous and not any(acts):
        y = colwise(x, *_rows_of(weight, bias, *run), backend=backend)
        return y.split([stop - start for start, stop in rows], -1)

    def twin(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        ys = _torch(x, weight, bias, rows, acts)
        return tuple(y.contiguous() for y in ys) if contiguous else tuple(ys)

    if backends.choose("packed_colwise", x, backend) == "torch":
        return twin(x, weight, bias)

    def kernel(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        return tuple(ops.colwise_blocks(*_arguments(x, weight, bias, rows, acts)))

    if needs_grad(x, weight, bias):
        return Twin.apply(kernel, twin, x, weight, bias)
    return kernel(x, weight, bias)


def _blocks(
    weight: torch.Tensor, ranges: Ranges | None, activations: Activations | None
) -> tuple[list[tuple[int, int]], list[str | None]]:
    rows = check_ranges(ranges, weight.shape[0], "rows")
    acts: list[str | None] = [None] * len(rows) if activations is None else list(activations)
    if len(acts) != len(rows) or any(name is not None and name not in ACTIVATIONS for name in acts):
        raise ValueError(f"activations {acts} for {len(rows)} blocks: each None or one of {', '.join(ACTIVATIONS)}")
    return rows, acts


def _arguments(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: Rows, activations: Activations
) -> tuple[Any, ...]:
    """What `ops.colwise` and `ops.colwise_blocks` take, checked."""
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}")
    check_linear([x], weight, bias)
    starts, widths = [start for start, _ in rows], [stop - start for start, stop in rows]
    return x, weight, bias, starts, widths, [name or "" for name in activations]


def _torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, rows: Rows, activations: Activations
) -> list[torch.Tensor]:
    """The blocks' outputs; views of one projection where the blocks are rows of the weight in turn."""
    run = in_one_run(rows)
    if run is not None:
        ys = [colwise_reference(x, *_rows_of(weight, bias, *run))]
        if len(rows) > 1:
            ys = list(ys[0].split([stop - start for start, stop in rows], -1))
    else:
        ys = [colwise_reference(x, *_rows_of(weight, bias, *row)) for row in rows]
    return [y if name is None else ACTIVATIONS[name](y) for y, name in zip(ys, activations, strict=True)]


def _rows_of(
    weight: torch.Tensor, bias: torch.Tensor | None, start: int, stop: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of weight and bias, as views; themselves where that is all of them."""
    if stop - start == weight.shape[0]:
        return weight, bias
    return weight[start:stop], None if bias is None else bias[start:stop]


def colwise_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`colwise` of one block in plain torch and in the dtype it is given."""
    # On the input's own shape: a flattened addmm differs from the unsharded layer's F.linear by rounding.
    return F.linear(x, weight, cast(bias, x.dtype))
