"""A model without weights: parameters on meta in their final dtype, buffers and plain attributes real."""

import logging
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..plans.spec import ShardSpec
from . import pretrained
from .meta import FLOAT8, building, built
from .snapshot import Source

logger = logging.getLogger(__name__)


def build(model_class: type[nn.Module], config: dict[str, Any], dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a diffusers `config`, in eval mode; buffers have the dtypes `from_pretrained` would give them.

    Raises:
        ValueError: the class is not built from a config (not a diffusers model), or not from this one, or it computes
            buffers from parameters.
    """
    if not hasattr(model_class, "from_config"):
        raise ValueError(
            f"{model_class.__name__} has no from_config: load reads models of diffusers and transformers; "
            f"build others yourself and call tp_layers.apply"
        )
    try:
        with building(dtype):
            model = model_class.from_config(config)
    except Exception as error:
        # Whatever a constructor makes of a number it cannot use.
        raise ValueError(f"a {model_class.__name__} cannot be built from its config: {error}") from error
    return built(model)


def check_keys(
    model: nn.Module,
    entries: dict[str, Source],
    check: bool = True,
    specs: Mapping[str, ShardSpec] = MappingProxyType({}),
) -> dict[str, Source]:
    """The entries of the model's own tensors, by name, in the order of the files.

    `specs` are those of the parameters of which the model holds a shard: the checkpoint has them whole.

    Raises:
        ValueError: a tensor is missing from the checkpoint or has another shape or kind there, or (unless `check` is
            False) the checkpoint has tensors that the model lacks and does not name as ignored.
    """
    wanted = model.state_dict(keep_vars=True)
    what = type(model).__name__
    missing = _missing(model, wanted, entries)
    if missing:
        raise ValueError(f"the checkpoint lacks {missing}, which {what} needs")
    extra = _extra(model, sorted(set(entries) - set(wanted)))
    if extra and check:
        raise ValueError(f"the checkpoint has {extra}, which {what} does not; check=False loads it without them")
    if extra:
        logger.warning("the checkpoint has %s, which %s does not: not read", extra, what)
    kept = {name: entry for name, entry in entries.items() if name in wanted}
    for name, entry in kept.items():
        tensor, spec = wanted[name], specs.get(name)
        shape = tuple(tensor.shape) if spec is None else spec.full_shape(tensor.shape)
        if shape != entry.shape:
            raise ValueError(f"'{name}' is {entry.shape} in the checkpoint, {what} has {shape}")
        if (tensor.is_floating_point(), tensor.is_complex()) != (entry.dtype.is_floating_point, entry.dtype.is_complex):
            raise ValueError(f"'{name}' is {entry.dtype} in the checkpoint, {tensor.dtype} in {what} (quantised?)")
    return dict(sorted(kept.items(), key=lambda item: (str(item[1].file), item[1].offset)))


def _missing(model: nn.Module, wanted: dict[str, torch.Tensor], entries: dict[str, Source]) -> list[str]:
    ties: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        ties.setdefault(id(tensor), []).append(name)
    # A buffer has the value of its constructor, a parameter would have none.
    ignored = [name for name in _matching(model, "missing", wanted) if not isinstance(wanted[name], nn.Parameter)]
    return [names[0] for names in ties.values() if not any(name in entries or name in ignored for name in names)]


def _extra(model: nn.Module, names: list[str]) -> list[str]:
    ignored = set(_matching(model, "unexpected", names))
    if pretrained.is_pretrained(model):
        ignored |= pretrained.once_saved(model, names)
    return [name for name in names if name not in ignored]


def _matching(model: nn.Module, kind: str, names: Iterable[str]) -> list[str]:
    """The names that the class lists in `_keys_to_ignore_on_load_missing` or `.._unexpected`."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or []
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]


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
