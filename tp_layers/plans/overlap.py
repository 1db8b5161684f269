"""Which layers of a sharded model reduce their output while something else is computed; see `layers/overlap.py`."""

from typing import Any

import torch
from torch import nn

from ..group import Group
from ..layers.linear import RowwiseLinear
from ..layers.overlap import Overlap
from ..rates import Rates, measure

# Of one attention: the first one's sum is not read before the second one, of the other stream, is computed.
FIRST, SECOND = "to_out.0", "to_add_out"


def check_overlap(overlap: Any) -> str:
    """What all ranks must have alike, as chunks are reduced one by one.

    Raises:
        ValueError: it is no bool, rates, or positive number of chunks.
    """
    if not (isinstance(overlap, bool | Rates) or (isinstance(overlap, int) and overlap > 0)):
        raise ValueError(f"overlap must be True, False, a number of chunks, or measured rates, got {overlap!r}")
    return f"overlap {overlap!r}"


def overlap_model(model: nn.Module, overlap: bool | int | Rates, group: Group) -> None:
    """From now on the rowwise layers of a sharded model overlap. With True the rates are measured first, by all ranks.

    A number is taken for every layer, whatever it costs.
    """
    if overlap is False or group.size == 1:
        return
    chunks = measure(group, _dtype(model)) if overlap is True else overlap
    for module in model.modules():
        if isinstance(module, RowwiseLinear) and module.reduce:
            module.overlap = Overlap(chunks)
    for module in model.modules():
        first, second = _child(module, FIRST), _child(module, SECOND)
        if first is not None and second is not None:
            first.overlap = Overlap(chunks, later=True)


def _child(module: nn.Module, path: str) -> RowwiseLinear | None:
    try:
        found = module.get_submodule(path)
    except AttributeError:
        return None
    return found if isinstance(found, RowwiseLinear) and found.reduce else None


def _dtype(model: nn.Module) -> torch.dtype:
    return next((parameter.dtype for parameter in model.parameters() if parameter.dim() > 1), torch.float32)
