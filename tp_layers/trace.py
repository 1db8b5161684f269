"""What every module of a model returns in one forward call, and how a sharded run compares with an unsharded one."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .group import Group
from .plans.resolve import Resolved
from .plans.spec import ShardSpec

# Rounding in another order stays below 1e-5 in float32; the faults a plan can have start at about 1e-3.
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Finding:
    """One tensor of a sharded run: where it is, and its relative error, or why it could not be compared."""

    path: str
    place: str
    error: float
    problem: str = ""


@dataclass(frozen=True)
class Event:
    """The tensors that went into or came out of one module call."""

    path: str
    place: str
    tensors: list[torch.Tensor]


class Recorder:
    """Runs a model and keeps each module's output in order, and the input of modules that take a split one."""

    def __init__(self, model: nn.Module, resolved: Resolved) -> None:
        self.model, self.resolved = model, resolved
        self.events: list[Event] = []
        self.failure: Exception | None = None
        self.inside: list[str] = []

    def run(self, inputs: Any) -> None:
        """One forward call; what it raises is kept in `failure`, and `inside` then ends with the module it is from."""
        handles = []
        for path, module in self.model.named_modules():
            handles.append(module.register_forward_pre_hook(self._enter(path), with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave(path)))
        try:
            with torch.no_grad():
                if isinstance(inputs, Mapping):
                    self.model(**inputs)
                else:
                    self.model(*inputs)
        except Exception as error:
            self.failure = error
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, path: str) -> Any:
        style = self.resolved.styles.get(path)
        takes_split = style is not None and style.input == "split"

        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self.inside.append(path)
            if takes_split:
                self._keep(path, "input", (args, kwargs))

        return hook

    def _leave(self, path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            self.inside.pop()
            self._keep(path, "output", output)

        return hook

    def _keep(self, path: str, place: str, value: Any) -> None:
        self.events.append(Event(path, place, [tensor.detach().clone() for tensor in _tensors(value)]))


def findings(reference: Recorder, sharded: Recorder, resolved: Resolved, group: Group) -> Iterator[Finding]:
    """What a sharded run shows, in the order of its module calls, up to the one that fails or has no counterpart."""
    specs = {_proportions(spec) for spec in resolved.specs.values()} | {ShardSpec(0, (1,))}
    adders = [path for path, style in resolved.styles.items() if style.input == "partial"]
    for wanted, got in zip(reference.events, sharded.events, strict=False):
        if (wanted.path, wanted.place) != (got.path, got.place) or len(wanted.tensors) != len(got.tensors):
            yield Finding(got.path, got.place, math.nan, f"the unsharded model runs '{wanted.path}' at this point")
            return
        own = resolved.specs.get(f"{got.path}.weight")
        style = resolved.styles.get(got.path)
        planned = own is not None and style is not None and "split" in (style.input, style.output)
        candidates = {_proportions(own)} if own is not None and planned else specs
        adds = any(got.path.startswith(f"{path}.") for path in adders)
        for full, local in zip(wanted.tensors, got.tensors, strict=True):
            found = _finding(got, full, local, candidates, group)
            # A partial sum has no counterpart on one rank; what it is part of is compared where the sum is taken.
            if not (adds and full.shape == local.shape and found.error > TOLERANCE):
                yield found
    if sharded.failure is not None:
        path = sharded.inside[-1] if sharded.inside else ""
        yield Finding(path, "forward", math.nan, f"{type(sharded.failure).__name__}: {sharded.failure}")


def _finding(
    event: Event, full: torch.Tensor, local: torch.Tensor, candidates: set[ShardSpec], group: Group
) -> Finding:
    if full.shape == local.shape:
        return Finding(event.path, event.place, _relative(local, full))
    if event.path == "":
        problem = f"the model returns {tuple(local.shape)} in place of {tuple(full.shape)}: its output is split"
        return Finding(event.path, event.place, math.nan, problem)
    dims = [dim for dim in range(full.dim()) if full.dim() == local.dim() and full.shape[dim] != local.shape[dim]]
    errors = []
    for cut in candidates if len(dims) == 1 else ():
        try:
            spec = ShardSpec.of(dims[0], full.shape[dims[0]], cut.blocks, cut.granules)
            part = spec.take(full, group.rank, group.size)
        except ValueError:
            # This cut belongs to a layer of another width.
            continue
        if part.shape == local.shape:
            errors.append(_relative(local, part))
    if errors:
        return Finding(event.path, event.place, min(errors))
    problem = f"its shape {tuple(local.shape)} is neither that of one rank, {tuple(full.shape)}, nor a part of it"
    return Finding(event.path, event.place, math.nan, problem)


def _proportions(spec: ShardSpec) -> ShardSpec:
    """The cut of any dim that has the blocks of `spec` in the same proportions, such as heads in place of channels."""
    unit = math.gcd(*spec.blocks)
    return ShardSpec(0, tuple(block // unit for block in spec.blocks), spec.granules)


def _relative(got: torch.Tensor, wanted: torch.Tensor) -> float:
    if not wanted.numel() or torch.equal(got, wanted):
        return 0.0
    if not wanted.is_floating_point():
        return math.inf
    return float((got.double() - wanted.double()).norm() / wanted.double().norm().clamp_min(1e-30))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
