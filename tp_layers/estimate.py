"""`estimate`: how long a step takes on some hardware at each size, by arithmetic, from shapes alone.

    GEMMs        of every Linear and convolution 2 * rows * its weights on the largest rank, or the time to read them,
                 whichever is longer. A sum over one rank, so what stays whole costs each rank its full time
    attention    4 * queries * keys * this rank's width, at the rate of a GEMM, also where it is linear or sparse
    collectives  a latency each, and bytes by the rate of a ring. None is hidden
    hidden       what a reduction in chunks, while the next chunk is computed, would take off

Left out: norms, activations, rotary tables and whatever else is elementwise; what the host takes to launch it all; and
that small products are slower than large ones. Every row's kind follows from its layer's name (see `rows.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .describe import Call, calls, report
from .hardware import Hardware
from .plans.linear_styles import PackedRowwiseParallel
from .plans.registry import plan_for
from .plans.resolve import Resolved, resolve
from .plans.shard import sharding_of
from .rates import Rates
from .rows import Rows, Tokens
from .work import attentions, local_shape, products

SIZES = (1, 2, 4, 8, 16)
# Of the memory, for weights and the activations of one layer; the rest is for all else.
USABLE = 0.9


@dataclass(frozen=True)
class Step:
    """One forward call on `size` ranks: seconds, bytes and floating-point operations of the largest rank.

    `hidden`: of `collectives`, what overlap in chunks would hide; `working_bytes`: of one layer's input and output.
    """

    size: int
    nodes: int
    gemms: float
    attention: float
    collectives: float
    hidden: float
    flops: float
    calls: int
    payload_bytes: int
    held_bytes: int
    working_bytes: int
    memory: float

    @property
    def seconds(self) -> float:
        """Of the whole step, without overlap."""
        return self.gemms + self.attention + self.collectives

    @property
    def fits(self) -> bool:
        """Whether weights and one layer's activations leave a tenth of the memory free."""
        return self.held_bytes + self.working_bytes <= USABLE * self.memory


@dataclass(frozen=True)
class Estimate:
    """What `estimate` found; `str(estimate)` is the table the command prints."""

    model: str
    hardware: str
    tokens: Tokens
    steps: list[Step]

    @property
    def fastest(self) -> Step | None:
        """The quickest of the sizes that fit; None: none does."""
        return min((step for step in self.steps if step.fits), key=lambda step: step.seconds, default=None)

    def __str__(self) -> str:
        text = f" and {self.tokens.text} text tokens" if self.tokens.text else " tokens, without text"
        lines = [
            f"{self.model} on {self.hardware}: a step of {self.tokens.image} image{text}, estimated",
            f"{'ranks':>5} {'nodes':>5} {'step ms':>10} {'GEMMs':>10} {'attention':>10} {'collectives':>11} "
            f"{'hideable':>9} {'GB held':>8}",
        ]
        for step in self.steps:
            times = (step.seconds, step.gemms, step.attention, step.collectives, step.hidden)
            cells = (f"{1e3 * it:{width}.2f}" for it, width in zip(times, (10, 10, 10, 11, 9), strict=True))
            verdict = "fits" if step.fits else "does not fit"
            verdict = "fastest" if step is self.fastest else verdict
            lines.append(
                f"{step.size:5} {step.nodes:5} {' '.join(cells)} {step.held_bytes / 1e9:8.2f}  {verdict}",
            )
        return "\n".join([*lines, "left out: what is elementwise, launches, and that small products are slower"])


def estimate(
    model: nn.Module,
    hardware: Hardware | Mapping[int, Hardware],
    tokens: Tokens,
    *,
    sizes: Sequence[int] | None = None,
    plan: Mapping[str, Any] | None = None,
    uneven: bool = False,
) -> Estimate:
    """How long a step of `model` takes at each of `sizes`, by default those of 1, 2, 4, 8 and 16 that the plan allows.

    Args:
        model: not sharded; a meta model is enough.
        hardware: one for all sizes, or, measured, one for each.
        tokens: the rows of one step.
        plan, uneven: as in `apply`.

    Raises:
        ValueError: the plan does not fit, or does not allow one of the sizes; the model is sharded already; or its
            weights are in a dtype that the rates are not of.
    """
    if sharding_of(model) is not None:
        raise ValueError("this model is sharded already: estimate a step of the full one, which may be on meta")
    chosen = plan_for(model) if plan is None else plan
    sizes = sizes_of(model, chosen, uneven) if sizes is None else sizes
    on = {size: hardware if isinstance(hardware, Hardware) else hardware[size] for size in sizes}
    dtype, wanted = main_dtype(model), next(iter(on.values())).dtypes
    if dtype not in wanted:
        names = " or ".join(str(it).removeprefix("torch.") for it in wanted)
        raise ValueError(
            f"the weights are in {dtype}, and these rates are of {names}: take the model in that (--dtype)"
        )
    rows, steps = Rows(model), []
    for size in sizes:
        resolved = resolve(model, chosen, size, check=False, uneven=uneven)
        steps.append(_step(model, resolved, rows, tokens, on[size]))
    return Estimate(type(model).__name__, next(iter(on.values())).name, tokens, steps)


def sizes_of(model: nn.Module, plan: Mapping[str, Any], uneven: bool = False) -> list[int]:
    """Those of 1, 2, 4, 8 and 16 that `plan` allows."""
    allowed = resolve(model, plan, 1, check=False, uneven=uneven).sizes
    return [size for size in SIZES if size in allowed]


def main_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most bytes of the parameters."""
    found: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        found[parameter.dtype] = found.get(parameter.dtype, 0) + parameter.nbytes
    return max(found, key=lambda dtype: found[dtype])


def _step(model: nn.Module, resolved: Resolved, rows: Rows, tokens: Tokens, hardware: Hardware) -> Step:
    rates, layers = hardware.rates(resolved.size), list(products(model, resolved, rows, tokens))
    attention = sum(attentions(model, resolved, rows, tokens))
    made = [(call, tokens.of(rows.kind(call.path))) for call in calls(model, resolved)]
    made = [(call, count) for call, count in made if count]
    gemms = sum(max(it.flops / hardware.flops, it.weight_bytes / hardware.bandwidth) for it in layers)
    return Step(
        size=resolved.size,
        nodes=hardware.nodes(resolved.size),
        gemms=gemms,
        attention=attention / hardware.flops,
        collectives=sum(_seconds(call, count, rates) for call, count in made),
        hidden=sum(_hidden(model, resolved, call, count, rates) for call, count in made),
        flops=sum(it.flops for it in layers) + attention,
        calls=sum(not call.along for call, _ in made),
        payload_bytes=sum(call.bytes_per_row * count for call, count in made),
        held_bytes=report(model, resolved).held_bytes,
        working_bytes=max((it.row_bytes for it in layers), default=0),
        memory=hardware.memory,
    )


def _seconds(call: Call, count: int, rates: Rates) -> float:
    """Of one collective of `count` rows."""
    times = 0 if call.along else 2 if call.kind.startswith("all-reduces") else 1
    # A ring gathers in half the steps that it takes to reduce.
    rate = rates.transfer * (2 if call.kind.startswith("all-gather") else 1)
    return times * rates.latency + call.bytes_per_row * count / rate


def _hidden(model: nn.Module, resolved: Resolved, call: Call, count: int, rates: Rates) -> float:
    """What reducing the output of a rowwise layer in chunks saves."""
    layer = None
    if isinstance(resolved.styles[call.path], PackedRowwiseParallel):
        layer = model.get_submodule(call.path)
    if not isinstance(layer, nn.Linear):
        return 0.0
    width, columns = local_shape(resolved, f"{call.path}.weight", layer.weight)
    shape = (count, width, columns, layer.weight.dtype.itemsize)
    return rates.seconds([width], *shape) - rates.seconds(rates.widths(*shape), *shape)
