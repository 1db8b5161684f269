"""A model without weights: parameters on meta in their final dtype, buffers and plain attributes real."""

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from .index import Entry

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# What `build` changes while it builds belongs to the whole process.
_BUILDING = threading.RLock()


@contextmanager
def _meta_parameters() -> Iterator[None]:
    """Within it, a parameter moves to meta the moment a module registers it.

    Under `torch.device("meta")` buffers and plain tensor attributes (rotary tables) would stay meta too. A parameter
    that is registered a second time is tied, and becomes the same object again.
    """
    register, builder = nn.Module.register_parameter, threading.get_ident()
    moved = WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # Other threads build models of their own meanwhile.
        if param is not None and not param.is_meta and threading.get_ident() == builder:
            if param not in moved:
                moved[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            param = moved[param]
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype if dtype is not None and dtype not in FLOAT8 else before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def build(model_class: type[nn.Module], config: dict[str, Any], dtype: torch.dtype | None = None) -> nn.Module:
    """The model of a diffusers `config`, in eval mode; buffers have the dtypes `from_pretrained` would give them.

    Raises:
        ValueError: the class is not built from a config (not a diffusers model), or computes buffers from parameters.
    """
    if not hasattr(model_class, "from_config"):
        raise ValueError(
            f"{model_class.__name__} has no from_config: load reads diffusers models; "
            f"build others yourself and call tp_layers.apply"
        )
    with _BUILDING, _meta_parameters(), _default_dtype(dtype):
        model = model_class.from_config(config)
    computed = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if computed:
        raise ValueError(f"{model_class.__name__} computes its buffers {computed} from parameters: use tp_layers.apply")
    return model.eval()


def check_keys(model: nn.Module, entries: dict[str, Entry]) -> dict[str, Entry]:
    """The entries of the model's own tensors, by name, in the order of the files.

    Raises:
        ValueError: a tensor is missing from the checkpoint or has another shape or kind there, or the checkpoint has
            tensors that the model lacks and does not name as ignored.
    """
    wanted = model.state_dict(keep_vars=True)
    ties: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        ties.setdefault(id(tensor), []).append(name)
    missing = [names for names in ties.values() if not any(name in entries for name in names)]
    extra = sorted(set(entries) - set(wanted))
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    extra = [name for name in extra if not any(re.search(pattern, name) for pattern in ignored)]
    what = type(model).__name__
    if missing:
        raise ValueError(f"the checkpoint lacks {[names[0] for names in missing]}, which {what} needs")
    if extra:
        raise ValueError(f"the checkpoint has {extra}, which {what} does not")
    kept = {name: entry for name, entry in entries.items() if name in wanted}
    for name, entry in kept.items():
        tensor = wanted[name]
        if tuple(tensor.shape) != entry.shape:
            raise ValueError(f"'{name}' is {entry.shape} in the checkpoint, {what} has {tuple(tensor.shape)}")
        if tensor.is_floating_point() != entry.dtype.is_floating_point:
            raise ValueError(f"'{name}' is {entry.dtype} in the checkpoint, {tensor.dtype} in {what} (quantised?)")
    return dict(sorted(kept.items(), key=lambda item: (str(item[1].file), item[1].offset)))


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


def set_dtypes(model: nn.Module, entries: dict[str, Entry], dtype: torch.dtype | None) -> None:
    """Gives each stored tensor's parameter or buffer its final dtype, so that a description of the model is exact."""
    places, state = Places(model), model.state_dict()
    for name, entry in entries.items():
        places.put(name, state[name].to(final_dtype(model, name, entry.dtype, dtype)))
