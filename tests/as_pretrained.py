"""Two models of transformers compared, and changes to the checkpoint of one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from checkpoints import identical, state_of
from pretrained import attributes

State = dict[str, torch.Tensor]


def tensors(model: Any) -> State:
    """Everything a model holds: parameters, buffers, and tables in plain attributes."""
    return {**model.state_dict(), **attributes(model)}


def ties(model: Any) -> list[list[str]]:
    """The names of each parameter that has several."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def same(model: Any, wanted: Any) -> None:
    """Asserts that everything but the sharding is as in `wanted`."""
    assert identical(tensors(model), tensors(wanted))
    assert ties(model) == ties(wanted)
    assert not any(tensor.is_meta for tensor in [*model.parameters(), *model.buffers()])
    assert not any(module.training for module in model.modules())
    assert model.config.to_dict() == wanted.config.to_dict() and model.name_or_path == wanted.name_or_path
    assert model.config._attn_implementation == wanted.config._attn_implementation
    if model.can_generate():
        assert model.generation_config.to_dict() == wanted.generation_config.to_dict()


def rewrite(folder: Path, change: Callable[[State], State]) -> State:
    """Replaces the state of a checkpoint in one file by what `change` makes of it."""
    state = change(state_of(folder))
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return state
