"""What a sharded model must still be when it is saved or reloaded."""

from typing import Any

from torch import nn

from ..plans.refuse import unplanned_fusions
from ..plans.shard import Sharding, sharding_of


class HalfLoaded:
    """Stands before the forward of a model of which some weights are those of another checkpoint."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def __call__(self, *args: Any) -> None:
        raise RuntimeError(f"{self.problem}; until it is reloaded, the model's weights are of two checkpoints")


def mark_half_loaded(model: nn.Module, problem: str | None) -> None:
    """From now on the model refuses to run, because of `problem`; or (None) does so no longer."""
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, HalfLoaded)]:
        del hooks[key]
    if problem is not None:
        model.register_forward_pre_hook(HalfLoaded(problem), prepend=True)


def sharding_to_use(model: nn.Module) -> Sharding:
    """The model's sharding.

    Raises:
        ValueError: it has none, and what to do instead.
    """
    sharding = sharding_of(model)
    if sharding is None:
        inner = [path for path, module in model.named_modules() if sharding_of(module) is not None]
        hint = f"its '{inner[0]}' is: take that" if inner else "use its own save_pretrained or load_state_dict"
        raise ValueError(f"this {type(model).__name__} is not sharded by tp_layers: {hint}")
    return sharding


def require_unchanged(model: nn.Module, sharding: Sharding) -> None:
    """The model still is what it was after sharding.

    A wrapped block has other names and a replaced layer other shapes: its shard would be taken for a whole parameter.

    Raises:
        ValueError: it is not.
    """
    state, specs = model.state_dict(keep_vars=True), sharding.resolved.specs
    group = sharding.group
    for name, spec in specs.items():
        if name not in state:
            raise ValueError(f"'{name}' is gone: do this before wrapping or replacing modules, or use model.compile()")
        local = tuple(state[name].shape)
        if local[spec.dim] != spec.extent(group.rank, group.size):
            raise ValueError(f"'{name}' is {local}, not a shard of {spec.full_shape(local)}: it was replaced")
    for path, module in model.named_modules():
        planned = any(name.startswith(f"{path}.") for name in specs)
        if planned and unplanned_fusions(path, module, sharding.resolved):
            raise ValueError(f"the projections of '{path}' were fused after sharding: unfuse them first")


def require_one_checkpoint(model: nn.Module) -> None:
    """The weights are those of one checkpoint.

    Raises:
        ValueError: the last `reload` failed after it had begun to read.
    """
    problem = next((hook.problem for hook in model._forward_pre_hooks.values() if isinstance(hook, HalfLoaded)), None)
    if problem is not None:
        raise ValueError(f"the model's weights are of two checkpoints, as its last reload failed: {problem}")
