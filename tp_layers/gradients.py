"""Gradients that no rank has whole: of parameters that several ranks hold, each using them for its own heads."""

import torch

from .collectives import all_reduce
from .group import Group
from .plans.spec import ShardSpec


def sum_gradient(parameter: torch.nn.Parameter, group: Group, spec: ShardSpec | None = None) -> None:
    """From now on the gradient of a whole `parameter` that every rank uses for its own heads is summed over the ranks.

    With `spec`, the parameter is a shard of which other ranks hold some or all rows too: a row's gradient is summed
    over those ranks, by an all-reduce of the full tensor. Called again for the same parameter, it does nothing.
    """
    # By its identity: a copy of the parameter has the attribute, but not the hook.
    if group.size == 1 or getattr(parameter, "tp_layers_summed", None) == id(parameter):
        return
    parameter.tp_layers_summed = id(parameter)  # type: ignore[attr-defined]
    # A tensor accepts a hook only while it requires a gradient; the hook stays if it is frozen and thawed later.
    wanted = parameter.requires_grad
    parameter.requires_grad_(True)
    parameter.register_hook(lambda grad: _summed(grad, group, spec))
    parameter.requires_grad_(wanted)


def _summed(grad: torch.Tensor, group: Group, spec: ShardSpec | None) -> torch.Tensor:
    if spec is None:
        return all_reduce(grad.clone(memory_format=torch.contiguous_format), group)
    full = grad.new_zeros(spec.full_shape(grad.shape))
    spec.put(grad, full, group.rank, group.size)
    return spec.take(all_reduce(full, group), group.rank, group.size)
