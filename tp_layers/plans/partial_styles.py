"""The styles of a module in which many partial sums are added, such as experts, and all-reduced once where it ends.

    y = sum over ranks of f(x), where f is linear in the partial sums that this rank's layers return

Between a layer that leaves a partial sum and the end of the module nothing may happen that is not linear in it and
alike on all ranks, such as weights of a router: `f(a) + f(b) = f(a + b)`. A whole tensor added on the way would be
added once for every rank.

Under autograd every gradient within the module, of its inputs too, is of this rank's term alone. Those of the inputs
are summed where they enter it, in place of the sum at each colwise layer; those of whole parameters (the router's) by
their own style, `"replicated_with_grad_allreduce"`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ..collectives import replicate, summed
from ..group import Group
from ..layers.conv import ColwiseConv
from ..layers.linear import ColwiseLinear
from ..layers.options import DEFAULT, Options
from .linear_styles import Rowwise, rowwise
from .style import Style


class RowwisePartial(Rowwise):
    """`"rowwise_partial"`: rowwise, its partial sum left to the `"all_reduce_output"` around it."""

    output, collective = "partial", None

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        return rowwise(module, group=group, granules=self.granules, reduce=False, options=options)


@dataclass(frozen=True)
class _Enter:
    """The forward pre-hook: the gradient of every tensor that enters is summed over the ranks."""

    group: Group

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        return _mapped(args, self._summed), _mapped(kwargs, self._summed)

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        return replicate(x, self.group)


@dataclass(frozen=True)
class _Leave:
    """The forward hook: the sum of the ranks' outputs."""

    group: Group
    reduce_dtype: torch.dtype | None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> torch.Tensor:
        if not isinstance(output, torch.Tensor):
            what = f"{type(module).__name__} returns a {type(output).__name__}"
            raise TypeError(f"'all_reduce_output' adds the one tensor that a module returns; {what}")
        return summed(output, self.group, self.reduce_dtype)


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `function` of every tensor in its plain tuples, lists and dictionaries."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is dict:
        return {name: _mapped(item, function) for name, item in value.items()}
    return type(value)(_mapped(item, function) for item in value) if type(value) in (tuple, list) else value


class AllReduceOutput(Style):
    """`"all_reduce_output"`: the ranks' outputs of a module are partial sums, added by one all-reduce."""

    input, output, collective = "partial", "whole", "all-reduce"

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        module.register_forward_pre_hook(_Enter(group), with_kwargs=True)
        module.register_forward_hook(_Leave(group, options.reduce_dtype))
        return module

    def payload(self, target: Any) -> int:
        return 0  # nothing is added, see `describe`

    def watch(self, target: nn.Module | nn.Parameter, group: Group) -> None:
        for layer in cast(nn.Module, target).modules():
            if isinstance(layer, ColwiseLinear | ColwiseConv):
                layer.sums_gradient = False
