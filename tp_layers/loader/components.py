"""The components of a diffusers pipeline: which of them to shard, what became of each, and what a sharded one refuses.

A pipeline is known by its marks, as importing diffusers takes seconds.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..group import Group
from ..plans.refuse import OFFLOAD_HINT, Refusal
from ..plans.registry import is_planned, plan_for
from ..plans.shard import sharding_of
from .report import held_bytes

logger = logging.getLogger(__name__)

_OFFLOAD = ("be offloaded", OFFLOAD_HINT)
_SAVE = ("be saved as a whole", "call tp_layers.save for each sharded component, on all ranks")
REFUSED = {
    "save_pretrained": _SAVE,
    "push_to_hub": _SAVE,
    "enable_model_cpu_offload": _OFFLOAD,
    "enable_sequential_cpu_offload": _OFFLOAD,
    "enable_group_offload": _OFFLOAD,
    "load_lora_weights": ("load adapters by itself", "call tp_layers.load_adapter(pipeline.transformer, path)"),
    "load_ip_adapter": ("have an IP-adapter loaded", "use it with an unsharded pipeline"),
}


def is_pipeline(thing: Any) -> bool:
    """Whether this is a pipeline of diffusers, or a class of them."""
    return not isinstance(thing, nn.Module) and hasattr(thing, "components") and hasattr(thing, "_optional_components")


def modules_of(pipeline: Any) -> dict[str, nn.Module]:
    """The components that are models, by name; one that has several names, by the first."""
    models = {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}
    return {name: part for name, part in models.items() if _first(models, part) == name}


def _first(models: Mapping[str, nn.Module], model: nn.Module) -> str:
    return next(name for name, part in models.items() if part is model)


@dataclass(frozen=True)
class Component:
    """What became of one model of a pipeline: bytes of it in full, bytes held on this rank, and why it is whole."""

    name: str
    model: str
    sharded: bool
    full_bytes: int
    held_bytes: int
    reason: str = ""


@dataclass(frozen=True)
class PipelineReport:
    """What one rank holds of a sharded pipeline; `str(report)` is a table of its components."""

    rank: int
    size: int
    components: list[Component]

    @property
    def sharded(self) -> list[str]:
        """The names of the sharded components."""
        return [component.name for component in self.components if component.sharded]

    @property
    def held_bytes(self) -> int:
        """Bytes of the weights of all components on this rank."""
        return sum(component.held_bytes for component in self.components)

    @property
    def full_bytes(self) -> int:
        """Bytes of the weights of the unsharded pipeline."""
        return sum(component.full_bytes for component in self.components)

    def __str__(self) -> str:
        share = f"{self.held_bytes / 1e6:,.1f} MB of {self.full_bytes / 1e6:,.1f} MB"
        lines = [f"rank {self.rank} of {self.size} holds {share}"]
        for part in self.components:
            how = "sharded" if part.sharded else f"whole: {part.reason}"
            lines.append(f"  {part.name:<18} {part.held_bytes / 1e6:>12,.1f} MB  {part.model}, {how}")
        return "\n".join(lines)


def report_of(pipeline: Any, group: Group, reasons: Mapping[str, str]) -> PipelineReport:
    """The report of a pipeline whose models are where they belong; `reasons`: of those that are whole."""
    parts = []
    for name, model in modules_of(pipeline).items():
        sharded, sizes = sharding_of(model) is not None, (_full_bytes(model), held_bytes(model))
        parts.append(Component(name, type(model).__name__, sharded, *sizes, reasons.get(name, "")))
    return PipelineReport(group.rank, group.size, parts)


def _full_bytes(model: nn.Module) -> int:
    """Bytes of the unsharded model of which this is one rank's part: parameters and persistent buffers."""
    sharding = sharding_of(model)
    specs = {} if sharding is None else sharding.resolved.specs
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        shape = specs[name].full_shape(tensor.shape) if name in specs else tensor.shape
        found[id(tensor)] = math.prod(shape) * tensor.dtype.itemsize
    return sum(found.values())


def must_fit(model_class: type[nn.Module]) -> bool:
    """Whether a component that nobody named must be sharded: a model of diffusers with a plan, so no text encoder."""
    return hasattr(model_class, "save_config") and is_planned(model_class)


def why_whole(name: str, model: nn.Module | type[nn.Module], error: Exception | None = None) -> str:
    """Why a component stays whole; a warning, if there is a plan, and its model or checkpoint does not fit."""
    kind = model if isinstance(model, type) else type(model)
    planned = is_planned(kind) if isinstance(model, type) else _has_plan(model)
    if error is not None and planned:
        logger.warning("'%s' stays whole on every rank: %s", name, error)
    # Of a class there is a checkpoint that was refused, plan or not; of a model without one, that is the reason.
    told = error is not None and (planned or isinstance(model, type))
    return str(error) if told else f"no plan for {kind.__name__}"


def _has_plan(model: nn.Module) -> bool:
    try:
        plan_for(model)
    except ValueError:
        return False
    return True


def check_names(known: Iterable[str], components: Sequence[str] | None, plan: Mapping[str, Any] | None) -> None:
    """Raises ValueError if the pipeline has no component of a name, or one has a plan but is not to be sharded.

    So it does for a string in place of a list of names, and one plan in place of one for each component.
    """
    known = list(known)
    if isinstance(components, str):
        raise ValueError(f"components= takes a list of names, such as [{components!r}]")
    for name in [*(components or ()), *(plan or ())]:
        if name not in known:
            raise ValueError(f"the pipeline has no model called '{name}'; its models are {', '.join(known)}")
    for name, its in (plan or {}).items():
        if its is not None and not isinstance(its, Mapping):
            raise ValueError(f"the plan of a pipeline maps names of components to plans, '{name}' has {its!r}")
        if components is not None and name not in components:
            raise ValueError(f"'{name}' has a plan, but is not among components={list(components)}")


class OwnDevice:
    """Stands for the `to` of a sharded pipeline, and of its sharded models, which would move shards elsewhere."""

    def __init__(self, pipeline: Any, device: torch.device) -> None:
        self.pipeline, self.device = pipeline, device

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for value in (*args, kwargs.get("device"), kwargs.get("tensor")):
            if isinstance(value, torch.Tensor):
                self._check(value.device)
            elif isinstance(value, torch.device | str) or (isinstance(value, int) and not isinstance(value, bool)):
                self._check(value)
        return type(self.pipeline).to(self.pipeline, *args, **kwargs)

    def _check(self, wanted: Any) -> None:
        device = torch.device(wanted)
        if device.index is None and device.type not in ("cpu", "meta"):
            device = torch.device(device.type, torch.accelerator.current_device_index())
        if device != self.device:
            raise ValueError(
                f"this {type(self.pipeline).__name__} is sharded by tp_layers, and this rank's part of it belongs on "
                f"{self.device}, not on {device}: it is there already, so leave out .to(...)"
            )


def settle(pipeline: Any, device: torch.device) -> None:
    """Moves the models of a sharded pipeline to this rank's device, where they stay, and puts the refusals on it."""
    for model in modules_of(pipeline).values():
        nn.Module.to(model, device)
        if sharding_of(model) is not None:
            # Another pipeline may take it over.
            model.__dict__["to"] = OwnDevice(model, device)
    pipeline.__dict__["to"] = OwnDevice(pipeline, device)
    for name, (what, instead) in REFUSED.items():
        if hasattr(type(pipeline), name):
            pipeline.__dict__[name] = Refusal(what, instead, "pipeline")
