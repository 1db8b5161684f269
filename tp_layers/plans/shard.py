"""A resolved plan carried out on a model, one module at a time; in memory and, on meta, for the loader."""

from dataclasses import dataclass, replace

from torch import nn

from ..group import Group
from ..layers.options import DEFAULT, Options
from ..layers.pair import pair_norms
from ..layers.sharded import ShardedLayer
from .around_styles import Watcher
from .context import allow_context
from .fuse import fuse_blocks
from .pairs import norm_pairs
from .refuse import guard
from .resolve import Resolved
from .styles import ShardParameter
from .ties import tie, tied


@dataclass(frozen=True)
class Sharding:
    """What a sharded model knows of itself: the group it is sharded over, and the plan as it was resolved."""

    group: Group
    resolved: Resolved


def sharding_of(model: nn.Module) -> Sharding | None:
    """The `Sharding` of a model sharded by this package, else None."""
    return model.__dict__.get("_tp_layers")


def shard_model(model: nn.Module, resolved: Resolved, group: Group, options: Options = DEFAULT) -> None:
    """Puts the sharded layers in place. Each full parameter is freed before the next one is cut."""
    specs, together = dict(resolved.specs), tied(model, resolved.specs)
    for path, style in resolved.styles.items():
        parent_path, _, name = path.rpartition(".")
        parent = model.get_submodule(parent_path)
        if isinstance(style, ShardParameter):
            setattr(parent, name, style.shard_parameter(getattr(parent, name), group))
            continue
        if name in parent._parameters:
            # A bare one that stays whole, of which each rank has the gradient of its own heads.
            _called(model, parent_path).register_forward_pre_hook(Watcher(group, parent, name))
            continue
        module = parent.get_submodule(name)
        sharded = style.shard(module, group, options)
        if isinstance(sharded, ShardedLayer) and not options.copy:
            # Its parameters stay whole, for saving as for describing.
            specs = {name: spec for name, spec in specs.items() if name.rpartition(".")[0] != path}
        if sharded is not module:
            parent._modules[name] = sharded.train(module.training)
    for name, spec in specs.items():
        if spec.copies(group.size) > 1:
            path, _, own = name.rpartition(".")
            owner = model.get_submodule(path)
            _called(model, path).register_forward_pre_hook(Watcher(group, owner, own, spec))
    for names in together:
        tie(model, names)
    for path in norm_pairs(resolved.styles, group.size):
        pair_norms(model.get_submodule(path))
    model.__dict__["_tp_layers"] = Sharding(group, replace(resolved, specs=specs))
    guard(model)
    allow_context(model, group)


def _called(model: nn.Module, path: str) -> nn.Module:
    """The module at `path`, or the nearest above it that is called: a container has no forward of its own."""
    module = model.get_submodule(path)
    return _called(model, path.rpartition(".")[0]) if path and type(module).forward is nn.Module.forward else module


def target_of(model: nn.Module, path: str) -> nn.Module | nn.Parameter:
    """What a plan names `path`: a module, or a bare parameter."""
    owner, _, name = path.rpartition(".")
    parameter = model.get_submodule(owner)._parameters.get(name)
    return model.get_submodule(path) if parameter is None else parameter


def fuse_model(model: nn.Module, options: Options) -> list[str]:
    """Fuses blocks of a sharded model, once it holds its values, and returns all that its reader should know.

    What is left as it is becomes one of the model's notes.
    """
    sharding = model.__dict__["_tp_layers"]
    notes = [*sharding.resolved.notes, *fuse_blocks(model, sharding.group, options)]
    model.__dict__["_tp_layers"] = replace(sharding, resolved=replace(sharding.resolved, notes=notes))
    return notes


def watch_gradients(model: nn.Module, resolved: Resolved, group: Group) -> None:
    """The last step, once every parameter holds its values: a hook belongs to a parameter, which loading replaces."""
    for path, style in resolved.styles.items():
        style.watch(target_of(model, path), group)
