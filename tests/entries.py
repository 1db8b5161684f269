"""Entries of a checkpoint that is not there."""

from pathlib import Path

import torch
from torch import nn

from tp_layers.loader.index import Entry


def entries(**tensors: torch.Tensor) -> dict[str, Entry]:
    """Entries of one file in the order given; `__` in a name stands for a dot."""
    return {
        name.replace("__", "."): Entry(Path("x"), tensor.dtype, tuple(tensor.shape), 100 * number)
        for number, (name, tensor) in enumerate(tensors.items())
    }


def entries_of(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, Entry]:
    """The entries of a checkpoint of `model`, floating-point tensors in `dtype`, the tied head left out."""
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ("head.weight", "same_shift")}
    cast = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in state.items()}
    return entries(**{name.replace(".", "__"): tensor for name, tensor in cast.items()})
