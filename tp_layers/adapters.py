"""Adapters (LoRA) on a sharded model: several at once, each with a scale, turned on and off, and taken away again."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from .agree import agreed
from .inputs import named_arguments
from .layers.low_rank import LowRank, adapters_of, attach, detach
from .loader.adapter_check import cut_layers
from .loader.adapter_file import read_adapter
from .loader.checked import require_unchanged, sharding_to_use
from .loader.folder import naming
from .loader.fuse_adapters import check_scale
from .plans.shard import Sharding

logger = logging.getLogger(__name__)


class RefuseScale:
    """Before a forward with adapters: a `scale` that diffusers hands to PEFT's adapters would change nothing here."""

    ARGUMENTS = ("joint_attention_kwargs", "attention_kwargs", "cross_attention_kwargs")

    def __call__(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        given = named_arguments(module, args, kwargs) if args else kwargs
        for name in self.ARGUMENTS:
            value = given.get(name)
            if isinstance(value, Mapping) and value.get("scale", 1.0) != 1.0:
                raise ValueError(f"the scale in {name} does not reach the adapters: use tp_layers.set_adapters")


def load_adapter(model: nn.Module, path: str | Path, scale: float = 1.0, *, name: str | None = None) -> str:
    """Loads a LoRA onto a sharded model, unfused, and returns its name. All ranks call it.

    Each rank reads the file and keeps, in the dtype and on the device of each layer, what meets its shards; layers that
    the plan leaves whole have all of it. It is active at once, beside those that are loaded already. The model's
    weights and `state_dict` stay as they are: `save` writes the model without its adapters, and `reload` gives them
    other weights to stand beside. They are frozen.

    Args:
        model: sharded by `apply` or `load`.
        path: a safetensors file, or a folder with `pytorch_lora_weights.safetensors` or PEFT's
            `adapter_model.safetensors`. Formats are those that diffusers converts for the class of the model; keys for
            text encoders are skipped, with a warning. The scale of each layer is that of the adapter's own alpha and
            rank, wherever its files have them, times `scale`.
        scale: by which all of it is multiplied.
        name: for `set_adapters` and `unload_adapter`. None: "default_0", or the next number that is free.

    Raises:
        ValueError: the name is taken, the file is no LoRA for this model (with the key and the reason), the ranks see
            different files, or another rank raises. The model is as it was.
        FileNotFoundError: there is no such file.
    """
    inner, sharding = _sharded(model)

    def prepare() -> tuple[str, dict[str, LowRank], str]:
        require_unchanged(inner, sharding)
        own, factor = _free_name(inner, name), check_scale(scale)
        adapter = read_adapter(inner, path)
        with naming(adapter.file):
            layers = cut_layers(inner, adapter.layers, sharding.resolved.specs, sharding.group)
        for at, layer in layers.items():
            layers[at] = layer.like(inner.get_parameter(f"{at}.weight"))
            layers[at].scale = factor
        return own, layers, f"{own} from {adapter.digest} times {factor}"

    own, layers, _ = agreed(sharding.group, prepare, lambda found: found[2])
    if not adapters_of(inner):
        inner.register_forward_pre_hook(RefuseScale(), with_kwargs=True)
    for at, layer in layers.items():
        attach(inner.get_submodule(at), own, layer)
    logger.info("adapter '%s' on %d layers of %s", own, len(layers), type(inner).__name__)
    return own


def set_adapters(model: nn.Module, names: str | Sequence[str], scales: float | Sequence[float] | None = None) -> None:
    """From now on the adapters called `names` are active, at their `scales`, and no others. All ranks call it.

    Args:
        model: with adapters by `load_adapter`.
        names: one, several, or none (`[]`).
        scales: as many numbers, or one for all of them. None: 1.0.

    Raises:
        ValueError: a name is none of those loaded, or comes twice; the scales are not as many or no finite numbers; the
            ranks give others, or another rank raises. Nothing has changed.
    """
    inner, sharding = _sharded(model)

    def prepare() -> dict[str, float]:
        wanted = [names] if isinstance(names, str) else list(names)
        numbers = list(scales) if isinstance(scales, Sequence) else [1.0 if scales is None else scales] * len(wanted)
        if len(numbers) != len(wanted) or len(set(wanted)) != len(wanted):
            raise ValueError(f"got the adapters {wanted} and the scales {numbers}: one for each, and none twice")
        for wanted_name in wanted:
            _require_loaded(inner, wanted_name)
        return {own: check_scale(number) for own, number in zip(wanted, numbers, strict=True)}

    chosen = agreed(sharding.group, prepare, lambda found: found)
    for own, layers in adapters_of(inner).items():
        for layer in layers:
            layer.scale = chosen.get(own, 0.0)


def unload_adapter(model: nn.Module, name: str) -> None:
    """Takes an adapter away again, and frees its memory. All ranks call it.

    Raises:
        ValueError: there is no adapter of that name, or not on every rank.
    """
    inner, sharding = _sharded(model)
    agreed(sharding.group, lambda: _require_loaded(inner, name), lambda found: name)
    for module in inner.modules():
        detach(module, name)
    if not adapters_of(inner):
        hooks = inner._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if isinstance(hook, RefuseScale)]:
            del hooks[key]
            inner._forward_pre_hooks_with_kwargs.pop(key, None)


def _sharded(model: nn.Module) -> tuple[nn.Module, Sharding]:
    # torch.compile(model) is a module around the model itself.
    inner = getattr(model, "_orig_mod", model)
    return inner, sharding_to_use(inner)


def _free_name(model: nn.Module, name: str | None) -> str:
    loaded = adapters_of(model)
    if name is None:
        return next(free for number in range(len(loaded) + 1) if (free := f"default_{number}") not in loaded)
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of an adapter must be a text, got {name!r}")
    if name in loaded:
        raise ValueError(f"there is an adapter '{name}' already: unload it, or choose another name")
    return name


def _require_loaded(model: nn.Module, name: str) -> None:
    loaded = adapters_of(model)
    if name not in loaded:
        raise ValueError(f"there is no adapter {name!r}: loaded are {', '.join(map(repr, loaded)) or 'none'}")
