"""The styles of what stands around linear layers: norms within heads, head counts, rotary tables, bare parameters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from ..collectives import split
from ..gradients import sum_gradient
from ..group import Group
from ..layers.options import DEFAULT, Options
from ..layers.sharded import shard_parameter
from .spec import ShardSpec
from .style import Style


@dataclass(frozen=True)
class Watcher:
    """Renews the sum of gradients before a call: a copied model has new parameters, without the hooks of the old.

    Without an `owner` it is that of all parameters of the module, which are whole; with one, that of its parameter
    `name`, a shard if there is a `spec`.
    """

    group: Group
    owner: nn.Module | None = None
    name: str = ""
    spec: ShardSpec | None = None

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.is_grad_enabled():
            for parameter in [getattr(self.owner, self.name)] if self.owner is not None else module.parameters():
                sum_gradient(parameter, self.group, self.spec)


class Replicate(Style):
    """`"replicate"`: left whole on every rank, and meant to be."""


class HeadParameters(Style):
    """`"replicated_with_grad_allreduce"`: whole parameters that each rank applies to its own heads (a q/k norm).

    Their values stay whole; every rank sees the gradient of its own heads only, so the gradients are summed. Its plan
    key names a module, or a bare `nn.Parameter`.
    """

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        module.register_forward_pre_hook(Watcher(group))
        return module

    def watch(self, target: nn.Module | nn.Parameter, group: Group) -> None:
        for parameter in target.parameters() if isinstance(target, nn.Module) else [target]:
            sum_gradient(parameter, group)


class Divide(Style):
    """Divides integer attributes of a module (head counts) by the size: `Divide("heads", "kv_heads")`."""

    def __init__(self, *attributes: str) -> None:
        if not attributes:
            raise ValueError('Divide needs the names of attributes, as in Divide("heads")')
        self.attributes = attributes

    def __repr__(self) -> str:
        return f"Divide({', '.join(map(repr, self.attributes))})"

    def counts(self, module: nn.Module) -> Mapping[str, int]:
        found = {name: getattr(module, name, None) for name in self.attributes}
        for name, value in found.items():
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{type(module).__name__}.{name} is {value!r}, not an integer to divide")
            if name not in vars(module):
                raise ValueError(f"{type(module).__name__}.{name} is no attribute of the module itself, to be set anew")
        return cast(Mapping[str, int], found)

    def lengths(self, target: Any) -> Sequence[int]:
        return tuple(self.counts(target).values())

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        counts = self.counts(module)
        for (name, value), granules in zip(counts.items(), self.granules or (None,) * len(counts), strict=True):
            # A count is cut as a dim of that extent is.
            spec = ShardSpec.of(0, value, granules=None if granules is None else (granules,))
            setattr(module, name, spec.extent(group.rank, group.size))
        return module


class Regroup(Divide):
    """Beside what `divide` does: of attention with one kv head on each rank, as many query heads read it as are there.

    No plan names it: it comes with kv heads that several ranks hold.
    """

    # Of transformers' attention, from which it repeats its kv heads.
    ATTRIBUTE = "num_key_value_groups"

    def __init__(self, divide: Divide | None, heads: int, granules: Sequence[int] | None) -> None:
        super().__init__(*(divide.attributes if divide else ()), self.ATTRIBUTE)
        self.divide, self.heads = divide, ShardSpec.of(0, heads, granules=granules)

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        if self.divide is not None:
            self.divide.shard(module, group, options)
        setattr(module, self.ATTRIBUTE, self.heads.extent(group.rank, group.size))
        return module


@dataclass(frozen=True)
class _Slicer:
    """The forward hook of `SliceOutput`, a class so that a sharded model can be copied and pickled."""

    dim: int
    group: Group
    granules: tuple[int, ...] | None = None

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            if not -output.dim() <= self.dim < output.dim():
                what = f"{type(module).__name__} returns a tensor of shape {tuple(output.shape)}"
                raise ValueError(f"SliceOutput({self.dim}): {what}, which has no such dim")
            return split(output, self.group, ShardSpec.of(self.dim, output.shape[self.dim], granules=self.granules))
        if type(output) in (tuple, list):
            return type(output)(self(module, args, item) for item in output)
        if isinstance(output, tuple | Mapping):
            # Passed on, the tensors in it would stay whole and be read as slices.
            what = f"{type(module).__name__} returns a {type(output).__name__}"
            raise TypeError(f"SliceOutput slices tensors, plain tuples and lists; {what}")
        return output


@dataclass(frozen=True)
class SliceOutput(Style):
    """Slices the tensors a module returns along `dim`: rotary tables that carry heads or channels."""

    dim: int
    output = "split"

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        module.register_forward_hook(_Slicer(self.dim, group, self.granules))
        return module


@dataclass(frozen=True)
class ShardParameter(Style):
    """Shards a bare `nn.Parameter` along `dim`; its plan key is the parameter's own path.

    `partial`: `dim` is summed over where the parameter is used, so that what comes out is a partial sum, for the
    `"all_reduce_output"` around it.
    """

    dim: int
    blocks: Sequence[int] | None = None
    partial: bool = False

    @property
    def output(self) -> str | None:  # type: ignore[override]
        """A partial sum, or nothing that is known."""
        return "partial" if self.partial else None

    def payload(self, target: Any) -> int:
        # A product with a matrix is as wide as the dim that is not summed over.
        others = [extent for dim, extent in enumerate(target.shape) if dim != self.dim % target.dim()]
        return (others[-1] if others else 1) * target.dtype.itemsize

    def parameter_spec(self, parameter: torch.Tensor) -> ShardSpec:
        if not -parameter.dim() <= self.dim < parameter.dim():
            raise ValueError(f"it has shape {tuple(parameter.shape)}, without a dim {self.dim}")
        return ShardSpec.of(self.dim, parameter.shape[self.dim], self.blocks, self.granules)

    def lengths(self, target: Any) -> Sequence[int]:
        return self.parameter_spec(target).blocks

    def shard_parameter(self, parameter: nn.Parameter, group: Group) -> nn.Parameter:
        """This rank's shard, as a parameter of its own."""
        return shard_parameter(parameter, self.parameter_spec(parameter), group)
