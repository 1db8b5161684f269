"""A model without weights: parameters on meta in their final dtype, buffers and plain attributes real."""

from typing import Any

import torch
from torch import nn

from . import pretrained
from .meta import FLOAT8, building, built
from .snapshot import Source


def build(model_class: type[nn.Module], config: dict[str, Any], dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a diffusers `config`, in eval mode; buffers have the dtypes `from_pretrained` would give them.

    Raises:
        ValueError: the class is not built from a config (not a diffusers model), or not from this one, or it computes
            buffers from parameters; or torch's default device is meta.
    """
    if not hasattr(model_class, "from_config"):
        raise ValueError(
            f"{model_class.__name__} has no from_config: load reads models of diffusers and transformers; "
            f"build others yourself and call tp_layers.apply"
        )
    with building(dtype):
        try:
            model = model_class.from_config(config)
        except Exception as error:
            # Whatever a constructor makes of a number it cannot use.
            raise ValueError(f"a {model_class.__name__} cannot be built from its config: {error}") from error
    return built(model)


def final_dtype(model: nn.Module, name: str, stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a stored tensor is loaded in: its own, or `dtype` for floating point, as diffusers casts.

    A tensor under a name in the class's `_keep_in_fp32_modules` becomes float32 whenever a dtype is asked for.
    """
    if dtype is None or not stored.is_floating_point or stored in FLOAT8:
        return stored
    keep = getattr(model, "_keep_in_fp32_modules", None) or []
    return torch.float32 if set(name.split(".")) & set([keep] if isinstance(keep, str) else keep) else dtype


class Places:
    """Where each parameter and buffer of a model is registered: a tied one in several places, all filled alike."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        for module in model.modules():
            for owner in (module._parameters, module._buffers):
                for name, tensor in owner.items():
                    self._places.setdefault(id(tensor), []).append((owner, name))

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Makes `tensor` the parameter or buffer called `name`."""
        path, _, attribute = name.rpartition(".")
        module = self._model.get_submodule(path)
        old = module._parameters[attribute] if attribute in module._parameters else module._buffers[attribute]
        new = nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor
        places = self._places.pop(id(old))
        for owner, own_name in places:
            owner[own_name] = new
        self._places[id(new)] = places


def set_dtypes(model: nn.Module, entries: dict[str, Source], dtype: torch.dtype | None) -> None:
    """Gives each stored tensor's parameter or buffer its final dtype, so that a description of the model is exact."""
    places, state = Places(model), model.state_dict()
    rule = pretrained.final_dtype if pretrained.is_pretrained(model) else final_dtype
    finals = {name: rule(model, name, entry.dtype, dtype) for name, entry in entries.items()}
    for name, final in finals.items():
        places.put(name, state[name].to(final))
