"""Which plan a model gets: the caller's, the registered one of its class, or the one that its library gave it."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from .families import PLANS
from .modulation import with_modulation
from .own_plans import has_own_plan, own_plan

Plan = Mapping[str, Any]
PlanLike = Plan | Callable[[nn.Module], Plan]

_PLANS: dict[str, PlanLike] = {}


def register(name: str, plan: PlanLike) -> None:
    """Registers `plan` for the model class called `name` and its subclasses; the last registration wins.

    `plan` maps module paths to styles, or is a function of the model that returns such a mapping.
    """
    if not (isinstance(plan, Mapping) or callable(plan)):
        raise ValueError(f"the plan for {name} must be a mapping or a function of the model, got {type(plan).__name__}")
    _PLANS[name] = plan


def plan_for(model: nn.Module, *, modulation: str = "auto") -> Plan:
    """The plan of `model`'s class, or of the nearest base that has one: registered, else its own `_tp_plan`.

    A model of transformers has its own plan last: it makes one for every instance, often of less.

    Args:
        modulation: what becomes of the layers the plan calls "modulation": "sharded", "whole", or "auto", which shards
            them where they are more than 5 % of the model's parameters.

    Raises:
        ValueError: there is neither, the plan's function refuses the model, its own plan has an unknown style, or
            `modulation` is none of the three.
    """
    return with_modulation(model, _plan_of(model), modulation)


def is_planned(model_class: type[nn.Module]) -> bool:
    """Whether every model of a class has a plan: a registered one, or the class's `_tp_plan`."""
    return any(base.__name__ in _PLANS or vars(base).get("_tp_plan") for base in model_class.__mro__)


def _plan_of(model: nn.Module) -> Plan:
    own = has_own_plan(model)
    if "_tp_plan" in vars(model) and not own and type(model).__name__ not in _PLANS:
        return vars(model)["_tp_plan"]
    for base in type(model).__mro__:
        if base.__name__ in _PLANS:
            plan = _PLANS[base.__name__]
            return plan(model) if callable(plan) else plan
        if vars(base).get("_tp_plan") and not own:
            return vars(base)["_tp_plan"]
    if own and (plan := own_plan(model)):
        return plan
    raise ValueError(
        f"no plan for {type(model).__name__}: pass plan={{...}}, or call tp_layers.register with its name; "
        f"registered are {', '.join(sorted(_PLANS))}"
    )


for _name, _plan in PLANS.items():
    register(_name, _plan)
