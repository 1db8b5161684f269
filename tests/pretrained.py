"""What from_pretrained has outside of the parameters: the model under a default dtype, buffers and tables."""

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


def under(dtype: torch.dtype | None, model_class: type[nn.Module], config: dict[str, Any]) -> nn.Module:
    """What from_pretrained builds before it reads: the model under that default dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        return model_class.from_config(config)
    finally:
        torch.set_default_dtype(before)


def attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model that are no parameters: buffers, and those its modules hold in plain attributes."""
    found = dict(model.named_buffers())
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_") or isinstance(value, nn.Module):
                continue
            leaves = [item for item in tree_leaves(value) if isinstance(item, torch.Tensor)]
            found |= {f"{path}.{name}.{number}": item for number, item in enumerate(leaves)}
    return found
