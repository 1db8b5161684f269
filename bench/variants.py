"""One operation four ways: the Triton kernel, its torch twin, each pass by itself, and that compiled by inductor.

triton    the kernel
torch     the twin that `backend="torch"` runs: `addmm` into the buffer, cat and activation around it
separate  as a model's own code has it: cat, mm, bias, split, activation, product, one after the other
compiled  `torch.compile` of the separate passes; of the twin for a norm
"""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from shapes import Case
from tp_layers.kernels.colwise import ACTIVATIONS, colwise, colwise_blocks
from tp_layers.kernels.gated import gated_colwise
from tp_layers.kernels.rms_norm import scale, sum_of_squares
from tp_layers.kernels.rowwise import rowwise

Variant = Callable[[], Any]


def variants_of(case: Case, device: str, dtype: torch.dtype) -> dict[str, Variant]:
    """The variants but the compiled one, all on the same random tensors."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        # Random, not zero: a GPU's clock is higher on zeros.
        return torch.randn(shape, generator=generator, device=device, dtype=dtype)

    xs = [draw(case.tokens, depth) for depth in case.depths]
    if not case.widths:
        return norm_variants(case, xs[0], draw(case.depths[0]))
    depth, width = sum(case.depths), sum(case.widths)
    # Activations stay near 1.
    weight, bias = draw(width, depth).mul_(depth**-0.5), draw(width)
    if case.operation.endswith("rowwise"):
        return rowwise_variants(xs, weight, bias)
    if case.operation == "gated_colwise":
        return gated_variants(xs[0], weight, bias, case.activation or "silu")
    return colwise_variants(case, xs[0], weight, bias)


def rowwise_variants(xs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Variant]:
    """Into the buffer that the all-reduce takes; NaN where nothing is written."""
    outs = {name: xs[0].new_full((xs[0].shape[0], weight.shape[0]), float("nan")) for name in ("triton", "torch")}

    def run(backend: str) -> torch.Tensor:
        return rowwise(xs, weight, bias, out=outs[backend], backend=backend)

    def separate() -> torch.Tensor:
        return torch.mm(xs[0] if len(xs) == 1 else torch.cat(xs, -1), weight.t()) + bias

    return {"triton": lambda: run("triton"), "torch": lambda: run("torch"), "separate": separate}


def colwise_variants(case: Case, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, Variant]:
    """One tensor for a bare projection, one for each block of a packed one."""
    ranges = list(itertools.pairwise(itertools.accumulate(case.widths, initial=0)))
    activations = [*[None] * (len(ranges) - 1), case.activation]

    def run(backend: str) -> Any:
        if case.operation == "colwise":
            return colwise(x, weight, bias, backend=backend)
        return colwise_blocks(x, weight, bias, ranges=ranges, activations=activations, backend=backend)

    def separate() -> Any:
        y = torch.mm(x, weight.t()) + bias
        if case.operation == "colwise":
            return y
        *blocks, last = y.split(case.widths, -1)
        last = last if case.activation is None else ACTIVATIONS[case.activation](last)
        return tuple(block.contiguous() for block in (*blocks, last))

    return {"triton": lambda: run("triton"), "torch": lambda: run("torch"), "separate": separate}


def gated_variants(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, activation: str) -> dict[str, Variant]:
    """SwiGLU or GEGLU."""

    def run(backend: str) -> torch.Tensor:
        return gated_colwise(x, weight, bias, activation=activation, backend=backend)

    def separate() -> torch.Tensor:
        gate, up = (torch.mm(x, weight.t()) + bias).chunk(2, -1)
        return ACTIVATIONS[activation](gate) * up

    return {"triton": lambda: run("triton"), "torch": lambda: run("torch"), "separate": separate}


def norm_variants(case: Case, x: torch.Tensor, weight: torch.Tensor) -> dict[str, Variant]:
    """The twin of a norm is its passes by themselves."""
    squares = x.float().pow(2).sum(-1, keepdim=True)

    def run(backend: str) -> torch.Tensor:
        if case.operation == "sum_of_squares":
            return sum_of_squares(x, backend=backend)
        return scale(x, squares, x.shape[-1], 1e-6, weight, backend=backend)

    return {"triton": lambda: run("triton"), "torch": lambda: run("torch")}


def compiled(variants: dict[str, Variant]) -> Variant:
    """The compiled variant, compiled at its first call and for this case alone."""
    torch._dynamo.reset()
    return torch.compile(variants.get("separate", variants["torch"]), dynamic=False)


def distance(got: Any, wanted: Any) -> float:
    """The largest relative error, of norms, among the outputs."""
    pairs = zip(got, wanted, strict=True) if isinstance(wanted, tuple) else [(got, wanted)]
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in pairs)
