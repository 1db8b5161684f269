"""Low-rank adapters (LoRA) beside the weights of linear layers, whole or sharded, without a change to the weights.

    y = x @ weight.T + factor * ((x @ down.T) @ up.T + bias)        factor = scale * scaling, scaling = alpha / r

    x     [.., K], down [r, K], up [N, r], bias [N] or None, y [.., N]

Of a layer that holds a shard, a rank holds the part of each that meets its shard: where rows of the weight are cut, the
same rows of `up` and of the bias; where columns are, the same columns of `down`, so that what is added is a part of the
partial sum, before it is reduced.

The adapters are frozen, of the dtype and on the device of the weight, and follow it (`.to()`); the gradient of `x` goes
through them. They are no part of a `state_dict`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..group import Group
from ..plans.spec import ShardSpec

Inputs = torch.Tensor | Sequence[torch.Tensor]


@dataclass
class LowRank:
    """One adapter's part in one layer. `scale` is the caller's, 0 where the adapter is turned off."""

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None
    scaling: float
    scale: float = 1.0

    @property
    def factor(self) -> float:
        """What the product is multiplied by; 0: nothing is computed."""
        return self.scale * self.scaling

    def shard(self, spec: ShardSpec | None, group: Group) -> "LowRank":
        """Of a whole adapter, what meets this rank's shard of a weight `[N, K]` that `spec` cuts (None: all of it)."""
        down, up, bias = self.down, self.up, self.bias
        if spec is not None and spec.dim % 2 == 1:
            down = spec.take(down, group.rank, group.size)
        elif spec is not None:
            up = spec.take(up, group.rank, group.size)
            bias = None if bias is None else spec.take(bias, group.rank, group.size)
        return LowRank(down, up, bias, self.scaling, self.scale)

    def like(self, weight: torch.Tensor) -> "LowRank":
        """A frozen copy of its own, in the dtype and on the device of `weight`."""

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.detach().to(weight.device, weight.dtype, copy=True).contiguous()

        bias = None if self.bias is None else copy(self.bias)
        return LowRank(copy(self.down), copy(self.up), bias, self.scaling, self.scale)


class Adaptable(nn.Module):
    """A linear layer that may have adapters beside its weight, by name."""

    adapters: dict[str, LowRank]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        # What `.to()` and its like do to the parameters; the adapters are none.
        found = super()._apply(fn, recurse)
        for adapter in self.adapters.values():
            adapter.down, adapter.up = fn(adapter.down), fn(adapter.up)
            adapter.bias = None if adapter.bias is None else fn(adapter.bias)
        return found


class AdaptedLinear(Adaptable, nn.Linear):
    """What a whole `nn.Linear` with adapters is an instance of: in place, so that its keys and hooks stay."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., K]` -> `[.., N]`."""
        return add_adapters(super().forward(x), x, self.adapters)


def add_adapters(y: torch.Tensor, x: Inputs, adapters: dict[str, LowRank], add_bias: bool = True) -> torch.Tensor:
    """`y [.., N]`, given up to the call, with what the `adapters` that are turned on make of the layer's input.

    `x [.., K]`, or several inputs that meet the columns of `down` in turn. A `y` wider than `x` is added to unrounded.
    """
    return add_ups(y, downs(x, adapters), adapters, add_bias)


def downs(x: Inputs, adapters: dict[str, LowRank]) -> list[torch.Tensor]:
    """`x @ down.T [.., r]` of each of the `adapters` that are turned on."""
    return [_down(x, adapter.down) for adapter in adapters.values() if adapter.factor]


def add_ups(
    y: torch.Tensor,
    low: list[torch.Tensor],
    adapters: dict[str, LowRank],
    add_bias: bool = True,
    part: slice = slice(None),
) -> torch.Tensor:
    """`y [.., N]`, given up to the call, with what the `adapters` make of `low`, their `downs`; of a `part` of N."""
    for h, adapter in zip(low, [adapter for adapter in adapters.values() if adapter.factor], strict=True):
        # One pass over y, in place: the buffer that is reduced or gathered. A copy only where y is not contiguous.
        rows, up = y.reshape(-1, y.shape[-1]), adapter.up[part]
        rows = rows.addmm_(h.reshape(-1, h.shape[-1]).to(y.dtype), up.t().to(y.dtype), alpha=adapter.factor)
        if adapter.bias is not None and add_bias:
            rows = rows.add_(adapter.bias[part].to(y.dtype), alpha=adapter.factor)
        y = rows.view(y.shape)
    return y


def _down(x: Inputs, down: torch.Tensor) -> torch.Tensor:
    """`x @ down.T [.., r]`."""
    if isinstance(x, torch.Tensor):
        return F.linear(x, down)
    parts = zip(x, down.split([part.shape[-1] for part in x], -1), strict=True)
    first, *others = [F.linear(part, columns) for part, columns in parts]
    return sum(others, first)


def adaptable(module: nn.Module) -> bool:
    """Whether the module can have adapters: a sharded linear layer, or a whole `nn.Linear` and none of its subclasses.

    torch's own subclass has its weight read by the attention around it, which does not call it.
    """
    return isinstance(module, Adaptable) or type(module) is nn.Linear


def attach(module: nn.Module, name: str, adapter: LowRank) -> None:
    """Gives a module that is `adaptable` an adapter."""
    if isinstance(module, Adaptable):
        module.adapters[name] = adapter
        return
    module.__class__ = AdaptedLinear
    module.__dict__["adapters"] = {name: adapter}


def detach(module: nn.Module, name: str) -> None:
    """Takes it away again, if the module has it; a whole layer without any is an `nn.Linear` as before."""
    if not isinstance(module, Adaptable):
        return
    module.adapters.pop(name, None)
    if isinstance(module, AdaptedLinear) and not module.adapters:
        del module.adapters
        module.__class__ = nn.Linear  # type: ignore[assignment]


def adapters_of(model: nn.Module) -> dict[str, list[LowRank]]:
    """All adapters in a model, by name, in the order in which they came."""
    found: dict[str, list[LowRank]] = {}
    for module in model.modules():
        if isinstance(module, Adaptable):
            for name, adapter in module.adapters.items():
                found.setdefault(name, []).append(adapter)
    return found
