"""The Triton operations as torch knows them, `torch.ops.tp_layers.*`: a schema, a launch and a fake for each.

    rowwise          xs [.., K_i], columns `starts` of the weight, bias -> y [.., N] of x's dtype or `dtype`
    rowwise_out      the same, into `out [.., N]` of any row stride
    colwise          x [.., K], rows `starts` to `starts + widths` of the weight, bias -> y [.., sum of widths]
    colwise_blocks   the same -> a tensor `[.., widths_i]` for each block
    gated            x [.., K], the `width` rows from `gate` and those from `up` of the weight, bias -> y [.., width]
    sum_of_squares   x [.., D / size] -> squares [.., 1], float32
    scale            x [.., D / size], squares [.., 1], weight, bias -> y [.., D / size]

torch.compile takes an operation as one node: it does not look into the launch, and learns of shapes, dtypes and strides
from the fake. They are not differentiable, which `autograd.py` and `rowwise.py` see to, and check nothing, which their
callers do. `Library.define` and `impl` cost a third of what `torch.library.custom_op` does for each call.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import backend as backends
from .configs import row_for, tile_for, tma_tile_for
from .contract import as_rows

Tensors = Sequence[torch.Tensor]
Shape = tuple[int, ...]

_LIBRARY = torch.library.Library("tp_layers", "DEF")


def _register(schema: str, fill: Callable[..., None], empty: Callable[..., Any]) -> Any:
    """The overload of a new operation: `fill(result, *arguments)` writes what `empty(*arguments)` allocates.

    `empty` is the fake too, so that the two cannot disagree.
    """
    name = _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))

    def run(*arguments: Any) -> Any:
        result = empty(*arguments)
        fill(result, *arguments)
        return result

    # On the CPU in Triton's interpreter.
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(name, run, key)
    torch.library.register_fake(f"tp_layers::{name}", empty, lib=_LIBRARY)
    return getattr(torch.ops.tp_layers, name).default


def _lead(x: torch.Tensor, width: int) -> Shape:
    return (*x.shape[:-1], width)


def _rowwise(
    y: torch.Tensor,
    xs: Tensors,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    starts: Sequence[int],
    dtype: torch.dtype | None = None,
) -> None:
    from .jit.rowwise import rowwise_launch
    from .jit.rowwise_tma import rowwise_tma_launch, takes_tma

    rows, inputs = y.view(y.shape[:-1].numel(), y.shape[-1]), [as_rows(x) for x in xs]
    which = backends.architecture(y.device), "rowwise", rows.shape[0], weight.dtype
    arguments = inputs, weight, bias, rows, starts
    tile = tma_tile_for(*which, y.dtype)
    if tile is not None and takes_tma(inputs, weight, starts, tile):
        rowwise_tma_launch(*arguments, tile, backends.processors(y.device)).run(y.device)
    else:
        rowwise_launch(*arguments, tile_for(*which)).run(y.device)


def _colwise(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    starts: Sequence[int],
    widths: Sequence[int],
    activations: Sequence[str],
) -> None:
    _colwise_blocks(as_rows(y).split(list(widths), -1), x, weight, bias, starts, widths, activations)


def _colwise_blocks(
    ys: Tensors,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    starts: Sequence[int],
    widths: Sequence[int],
    activations: Sequence[str],
) -> None:
    from .jit.colwise import colwise_launch
    from .jit.colwise_tma import colwise_tma_launch
    from .jit.rowwise_tma import takes_tma

    rows = as_rows(x)
    which = backends.architecture(x.device), "colwise", rows.shape[0], weight.dtype
    arguments = rows, weight, bias, [as_rows(y) for y in ys], starts, [name or None for name in activations]
    tile = tma_tile_for(*which)
    if tile is not None and takes_tma([rows], weight, [0], tile):
        colwise_tma_launch(*arguments, tile, backends.processors(x.device)).run(x.device)
    else:
        colwise_launch(*arguments, tile_for(*which)).run(x.device)


def _gated(
    y: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    gate: int,
    up: int,
    width: int,
    activation: str,
) -> None:
    from .jit.gated import gated_launch
    from .jit.gated_tma import gated_tma_launch
    from .jit.rowwise_tma import takes_tma

    rows = as_rows(x)
    which = backends.architecture(x.device), "gated", rows.shape[0], weight.dtype
    arguments = rows, weight, bias, as_rows(y), gate, up, activation
    tile = tma_tile_for(*which)
    if tile is not None and takes_tma([rows], weight, [0], tile):
        gated_tma_launch(*arguments, tile, backends.processors(x.device)).run(x.device)
    else:
        gated_launch(*arguments, tile_for(*which)).run(x.device)


def _sum_of_squares(squares: torch.Tensor, x: torch.Tensor) -> None:
    from .jit.rms_norm import sum_of_squares_launch

    step = row_for(backends.architecture(x.device), "sum_of_squares")
    sum_of_squares_launch(as_rows(x), squares, step).run(x.device)


def _scale(
    y: torch.Tensor,
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    width: int,
    eps: float,
    round_first: bool,
) -> None:
    from .jit.rms_norm import scale_launch

    step = row_for(backends.architecture(x.device), "scale")
    scale_launch(as_rows(x), squares, weight, bias, as_rows(y), width, eps, round_first, step).run(x.device)


_LINEAR = "Tensor x, Tensor weight, Tensor? bias"
_BLOCKS = "SymInt[] starts, SymInt[] widths, str[] activations"

rowwise = _register(
    "rowwise(Tensor[] xs, Tensor weight, Tensor? bias, SymInt[] starts, ScalarType? dtype) -> Tensor",
    _rowwise,
    lambda xs, weight, bias, starts, dtype: xs[0].new_empty(_lead(xs[0], weight.shape[0]), dtype=dtype or xs[0].dtype),
)
# A schema may not return the argument it writes.
rowwise_out = _register(
    "rowwise_out(Tensor[] xs, Tensor weight, Tensor? bias, SymInt[] starts, Tensor(a!) out) -> ()",
    lambda _, xs, weight, bias, starts, out: _rowwise(out, xs, weight, bias, starts),
    lambda xs, weight, bias, starts, out: None,
)
colwise = _register(
    f"colwise({_LINEAR}, {_BLOCKS}) -> Tensor",
    _colwise,
    lambda x, weight, bias, starts, widths, activations: x.new_empty(_lead(x, sum(widths))),
)
colwise_blocks = _register(
    f"colwise_blocks({_LINEAR}, {_BLOCKS}) -> Tensor[]",
    _colwise_blocks,
    lambda x, weight, bias, starts, widths, activations: [x.new_empty(_lead(x, width)) for width in widths],
)
gated = _register(
    f"gated({_LINEAR}, SymInt gate, SymInt up, SymInt width, str activation) -> Tensor",
    _gated,
    lambda x, weight, bias, gate, up, width, activation: x.new_empty(_lead(x, width)),
)
sum_of_squares = _register(
    "sum_of_squares(Tensor x) -> Tensor",
    _sum_of_squares,
    lambda x: x.new_empty(_lead(x, 1), dtype=torch.float32),
)
scale = _register(
    "scale(Tensor x, Tensor squares, Tensor? weight, Tensor? bias, SymInt width, float eps, bool round_first)"
    " -> Tensor",
    _scale,
    lambda x, squares, weight, bias, width, eps, round_first: x.new_empty(
        x.shape, dtype=weight.dtype if round_first else x.dtype
    ),
)
