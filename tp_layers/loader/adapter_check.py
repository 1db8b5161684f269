"""An adapter against a model, sharded or about to be: every layer of it must be one that can have it."""

from collections.abc import Mapping

from torch import nn

from ..group import Group
from ..layers.low_rank import Adaptable, LowRank, adaptable
from ..plans.spec import ShardSpec
from ..plans.ties import names_of

# What diffusers has fused, by the projection that is read instead.
READ_INSTEAD = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}


def cut_layers(
    model: nn.Module, layers: Mapping[str, LowRank], specs: Mapping[str, ShardSpec], group: Group
) -> dict[str, LowRank]:
    """Of a whole adapter's `layers`, what meets this rank's shards of `model`, whose parameters `specs` cut.

    The model may be whole yet, and on meta.

    Raises:
        ValueError: a layer is none of the model's, is not read, is no linear layer, or has other widths.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    unknown = [path for path in layers if path not in modules]
    if unknown:
        some = ", ".join(f"'{path}'" for path in unknown[:3])
        raise ValueError(
            f"{len(unknown)} of its {len(layers)} layers are none of this {type(model).__name__}'s: "
            f"{some}{_near(modules, unknown[0])}"
        )
    cut: dict[str, LowRank] = {}
    seen: dict[int, str] = {}
    for path, adapter in layers.items():
        module = modules[path]
        if (other := seen.setdefault(id(module), path)) != path:
            raise ValueError(f"'{path}' and '{other}' are one module, and the adapter has a layer for each")
        if not adaptable(module):
            raise ValueError(f"'{path}' is a {type(module).__name__}: only linear layers can have a LoRA here")
        if getattr(module, "ranges", None) is not None:
            raise ValueError(f"'{path}' reads its part of a full weight (copy=False): shard the model with copy=True")
        _check_read(model, path)
        spec = specs.get(f"{path}.weight")
        _check_shape(path, module, adapter, spec)
        cut[path] = adapter.shard(spec, group)
    return cut


def check_fusable(model: nn.Module, layers: Mapping[str, LowRank]) -> None:
    """Raises ValueError unless adapters with these `layers` can be added to the weights of `model`."""
    owners = names_of(model)
    for path, adapter in layers.items():
        module = model.get_submodule(path)
        others = [name for name in owners[id(module.weight)] if name != f"{path}.weight"]
        if others:
            raise ValueError(f"'{path}' is tied to {others}, which would be changed too: use tp_layers.load_adapter")
        if adapter.bias is not None and module.bias is None:
            raise ValueError(f"'{path}' has no bias to add the adapter's to: use tp_layers.load_adapter")


def _check_read(model: nn.Module, path: str) -> None:
    parent_path, _, name = path.rpartition(".")
    parent = model.get_submodule(parent_path)
    if not getattr(parent, "fused_projections", False):
        return
    for fused, separate in READ_INSTEAD.items():
        if name in separate and fused in parent._modules:
            raise ValueError(f"'{path}' is not read, as the projections are fused in '{parent_path}.{fused}'")


def _check_shape(path: str, module: nn.Module, adapter: LowRank, spec: ShardSpec | None) -> None:
    weight = module.get_parameter("weight").shape
    wanted = tuple(weight) if spec is None else spec.full_shape(weight)
    there = (adapter.up.shape[0], adapter.down.shape[1])
    if there != wanted:
        raise ValueError(f"'{path}' has a weight of {wanted}, the adapter is for one of {there}")
    if adapter.bias is not None and tuple(adapter.bias.shape) != wanted[:1]:
        raise ValueError(f"'{path}' has {wanted[0]} outputs, the adapter's bias is {tuple(adapter.bias.shape)}")


def _near(modules: Mapping[str, nn.Module], path: str) -> str:
    """What the model has in the place of a layer that it lacks."""
    parent = path.rpartition(".")[0]
    if parent not in modules:
        return ""
    children = modules[parent].named_children()
    there = [name for name, module in children if isinstance(module, nn.Linear | Adaptable)]
    return f" ('{parent}' has {', '.join(there)})" if there else ""
