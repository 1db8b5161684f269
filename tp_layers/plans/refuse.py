"""Models that cannot be sharded right, refused before anything is touched; and what a sharded model refuses."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ..layers.layer_norm import AcrossLayerNorm
from ..layers.norm import AcrossRMSNorm
from ..layers.sharded import ShardedLayer
from .resolve import Resolved
from .shared import FUSED
from .ties import names_of

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HEADS = "whose projections would make all heads, where each rank has only its own"
OFFLOAD_HINT = "sharding already keeps only this rank's part of each weight on its device"


def refuse(model: nn.Module) -> None:
    """Raises if `model` as a whole is in a state in which sharding it would give wrong numbers or lose something.

    Raises:
        ValueError: it is sharded, compiled, quantised, offloaded or carries an adapter; with what to do instead.
    """
    for reason in _reasons(model):
        raise ValueError(f"cannot shard this {type(model).__name__}: {reason}")


def refuse_planned(model: nn.Module, resolved: Resolved) -> None:
    """Raises if a planned module or parameter is in such a state.

    Raises:
        ValueError: it is parametrised, hooked, tied to what is not cut alike or not a plain floating-point tensor; with
            what to do instead.
    """
    for reason in _planned_reasons(model, resolved):
        raise ValueError(f"cannot shard this {type(model).__name__}: {reason}")


def _reasons(model: nn.Module) -> Iterator[str]:
    if "_tp_layers" in model.__dict__:
        yield "it is sharded already; save it with tp_layers.save, and load it again to shard it differently"
    config = getattr(model, "_parallel_config", None)
    if getattr(config, "tensor_parallel_config", None) is not None:
        yield "diffusers has sharded it already; load it without parallel_config"
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        yield "it is quantised, and packed weights have no rows and columns to cut; load it unquantised"
    if getattr(model, "hf_device_map", None) is not None:
        yield f"accelerate has placed it by a device_map; load it without one, {OFFLOAD_HINT}"
    for path, module in model.named_modules():
        yield from _module_reasons(path, module)


def _module_reasons(path: str, module: nn.Module) -> Iterator[str]:
    what = f"'{path}'" if path else "it"
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        yield f"{what} is compiled; shard first, then compile"
    if isinstance(module, ShardedLayer | AcrossRMSNorm | AcrossLayerNorm) or (path and "_tp_layers" in module.__dict__):
        yield f"{what} is sharded already"
    if hasattr(module, "_hf_hook"):
        yield f"accelerate offloads {what}; remove its hooks first, {OFFLOAD_HINT}"
    registry = getattr(module, "_diffusers_hook", None)
    names = [name for name in getattr(registry, "hooks", {}) if "offload" in name or "casting" in name]
    if names:
        yield f"{what} has diffusers' hook '{names[0]}', which moves or casts its weights; disable it first"
    if any(base.__name__ == "BaseTunerLayer" for base in type(module).__mro__):
        yield f"{what} carries an adapter (LoRA), which the plan does not cover; fuse or unload it first"


def _planned_reasons(model: nn.Module, resolved: Resolved) -> Iterator[str]:
    owners = names_of(model)
    for name, spec in resolved.specs.items():
        path, _, attribute = name.rpartition(".")
        planned = model.get_submodule(path)._parameters.get(attribute)
        if planned is None:
            yield f"'{path}' is parametrised, its '{attribute}' is computed; remove the parametrisation first"
            continue
        others = [other for other in owners[id(planned)] if other != name]
        if any(resolved.specs.get(other) != spec for other in others):
            yield f"'{name}' is tied to {others}; untie it or leave both out of the plan, or cut them alike"
        if type(planned.data) is not torch.Tensor or not planned.is_floating_point():
            kind = f"{type(planned.data).__name__} of {planned.dtype}"
            yield f"'{name}' is a {kind}, not a plain floating-point tensor (quantised, or sharded by another library)"
    yield from _fused_reasons(model, resolved)
    yield from _reading_reasons(model, resolved)
    yield from _processor_reasons(model, resolved)
    for path, style in resolved.styles.items():
        # Only a style with an input puts a layer of its own in the module's place.
        if style.input is not None:
            yield from _layer_reasons(path, model.get_submodule(path))


def unplanned_fusions(path: str, module: nn.Module, resolved: Resolved) -> list[str]:
    """Into what diffusers has fused the projections of `module`, at `path`, without the plan knowing of it."""
    fused = FUSED if getattr(module, "fused_projections", False) else ()
    return [name for name in fused if name in module._modules and f"{path}.{name}" not in resolved.styles]


def _fused_reasons(model: nn.Module, resolved: Resolved) -> Iterator[str]:
    """Attention whose projections diffusers has fused: the separate ones are still there, and no longer used."""
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in resolved.styles):
        missing = unplanned_fusions(parent, model.get_submodule(parent), resolved)
        if missing:
            yield f"the projections of '{parent}' are fused, and its plan lacks {missing}: unfuse first, or plan them"


def _reading_reasons(model: nn.Module, resolved: Resolved) -> Iterator[str]:
    """torch's modules that compute with the weights of their layers, some of them only where nothing has hooks."""
    for path in resolved.styles:
        parent = path.rpartition(".")[0]
        forward = type(model.get_submodule(parent)).forward
        for reader in (nn.TransformerEncoderLayer, nn.MultiheadAttention):
            if forward is reader.forward:
                yield (
                    f"'{parent}' is torch's {reader.__name__}, which reads the weights of '{path}' without calling it: "
                    f"leave it out of the plan"
                )


def _layer_reasons(path: str, module: nn.Module) -> Iterator[str]:
    """What the sharded layer in place of `module` would drop."""
    for name in getattr(module, "parametrizations", ()):
        yield f"'{path}' is parametrised, its '{name}' is computed; remove the parametrisation first"
    if any(getattr(module, hooks) for hooks in HOOKS):
        yield f"'{path}' has hooks, which its sharded layer would drop; remove them, and add them afterwards"
    if "forward" in vars(module):
        yield f"'{path}' has a forward of its own, which its sharded layer would drop; restore the class's"
    bias = getattr(module, "bias", None)
    if isinstance(module, nn.Linear) and isinstance(bias, torch.Tensor) and not isinstance(bias, nn.Parameter):
        yield f"the bias of '{path}' is a {type(bias).__name__}, not a parameter: make it one"
    own = [*module._parameters, *module._buffers, *module._modules]
    further = [name for name in own if name not in ("weight", "bias")]
    if isinstance(module, nn.Linear) and further:
        yield f"'{path}' has {further} beside its weight and bias, which its sharded layer would drop"


def _processor_reasons(model: nn.Module, resolved: Resolved) -> Iterator[str]:
    """Attention whose processor has projections of its own: they would make all heads, beside this rank's."""
    for parent in dict.fromkeys(path.rpartition(".")[0] for path in resolved.styles):
        processor = getattr(model.get_submodule(parent), "processor", None)
        name = type(processor).__name__
        own = isinstance(processor, nn.Module) and next(processor.parameters(), None) is not None
        planned = own and any(path.startswith(f"{parent}.processor.") for path in resolved.styles)
        if "IPAdapter" in name:
            yield f"the processor of '{parent}' is an IP-adapter ({name}), {_HEADS}; unload it first"
        elif own and not planned:
            yield f"the processor of '{parent}' ({name}) has weights of its own, {_HEADS}; plan them, or set another"


class Refusal:
    """Stands on a sharded model, or a pipeline that has one, for a method that would give wrong results.

    A class, so that it can be copied.
    """

    def __init__(self, what: str, instead: str, whose: str = "model") -> None:
        self.what, self.instead, self.whose = what, instead, whose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"this {self.whose} is sharded by tp_layers, so it cannot {self.what}: {self.instead}"
        )


_ADAPTER = ("have an adapter added by PEFT, whose layers would stay whole", "call tp_layers.load_adapter(model, path)")
_CHOSEN = ("choose among adapters of PEFT", "call tp_layers.set_adapters(model, names, scales)")
_FUSED = ("have adapters of PEFT fused", "pass adapters=[(path, scale)] to tp_layers.load")
_UNLOADED = ("have adapters of PEFT removed", "call tp_layers.unload_adapter(model, name)")
_OFFLOAD = ("be offloaded", OFFLOAD_HINT)
REFUSED = {
    "save_pretrained": ("be saved by each rank", "call tp_layers.save(model, path) on all ranks"),
    "push_to_hub": ("be pushed", "call tp_layers.save(model, path) and push that folder"),
    "add_adapter": _ADAPTER,
    "load_lora_adapter": _ADAPTER,
    "load_adapter": _ADAPTER,
    "set_adapter": _CHOSEN,
    "set_adapters": _CHOSEN,
    "enable_adapters": _CHOSEN,
    "disable_adapters": _CHOSEN,
    "enable_lora": _CHOSEN,
    "disable_lora": _CHOSEN,
    "fuse_lora": _FUSED,
    "unfuse_lora": _FUSED,
    "unload_lora": _UNLOADED,
    "delete_adapters": _UNLOADED,
    "fuse_qkv_projections": ("have its projections fused", "fuse them before sharding"),
    "enable_group_offload": _OFFLOAD,
    "enable_layerwise_casting": (
        "be cast layer by layer",
        "it would cast this rank's shards; load with dtype= instead",
    ),
    "_load_ip_adapter_weights": (
        "have an IP-adapter loaded",
        f"an adapter, {_HEADS}; use it with an unsharded model",
    ),
}


def guard(model: nn.Module) -> None:
    """Puts the refusals on a sharded model, and on each attention that could fuse its projections by itself."""
    for module in model.modules():
        if hasattr(module, "fuse_projections"):
            module.__dict__["fuse_projections"] = Refusal(*REFUSED["fuse_qkv_projections"])
    for name, (what, instead) in REFUSED.items():
        if hasattr(model, name):
            model.__dict__[name] = Refusal(what, instead)
