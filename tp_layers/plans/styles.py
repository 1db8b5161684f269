"""The styles of a plan: what each does to the parameters of its module, and what its layer takes and returns.

A tensor is *whole* (the same on every rank), *split* (each rank its part of the last dim), or a *partial sum*. Every
style names the state of its input and of its output, so that a plan can be checked before it is carried out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import nn

from ..collectives import split, sum_gradient
from ..group import Group
from ..layers.linear import ColwiseLinear, RowwiseLinear, shard_parameter
from ..layers.norm import AcrossRMSNorm, norm_width
from .spec import ShardSpec

Blocks = Sequence[int] | Callable[[nn.Linear], Sequence[int]] | None
Specs = dict[str, ShardSpec]


class Style:
    """One entry of a plan. Subclasses say what they shard (`specs`) and carry it out (`shard`)."""

    input: ClassVar[str | None] = None
    output: ClassVar[str | None] = None
    # The collective of one forward call, and its bytes per row: what describe() counts.
    collective: ClassVar[str | None] = None

    def payload(self, module: nn.Module) -> int:
        """Bytes per row of the input that the collective of `module` (full or sharded) carries."""
        weight = cast(torch.Tensor, module.weight)
        return cast(int, module.out_features) * weight.dtype.itemsize

    def specs(self, module: nn.Module) -> Specs:
        """The spec of every parameter of `module` that is sharded; a meta module is enough.

        Raises:
            ValueError: the style does not fit the module.
        """
        return {}

    def counts(self, module: nn.Module) -> Mapping[str, int]:
        """Further integers of `module` that the size must divide, by name."""
        return {}

    def shard(self, module: nn.Module, group: Group) -> nn.Module:
        """The module to put in `module`'s place (possibly itself), holding this rank's shards."""
        return module

    def watch(self, module: nn.Module, group: Group) -> None:
        """What is left to do once the parameters of the module `shard` returned hold their values."""


def _linear(module: nn.Module) -> nn.Linear:
    # A subclass with a forward of its own (a quantised or adapter layer) computes something else than x @ w.T + b.
    if not isinstance(module, nn.Linear) or type(module).forward is not nn.Linear.forward:
        raise ValueError(f"it is a {type(module).__name__}, not a plain nn.Linear")
    return module


@dataclass(frozen=True)
class _Packed(Style):
    """A linear layer cut by blocks: proportions or absolute sizes, a callable of the Linear, or left on the Linear."""

    blocks: Blocks = None
    dim: ClassVar[int]
    attribute: ClassVar[str]

    def blocks_of(self, linear: nn.Linear) -> Sequence[int]:
        blocks = self.blocks(linear) if callable(self.blocks) else self.blocks
        if blocks is None:
            blocks = getattr(linear, self.attribute, None)
        if not blocks:
            raise ValueError(
                f"{type(self).__name__} has no blocks: pass them, as in {type(self).__name__}([1, 1]), or set "
                f"`{self.attribute}` on the Linear"
            )
        return cast(Sequence[int], blocks)


@dataclass(frozen=True)
class PackedColwiseParallel(_Packed):
    """Rows cut block by block: fused qkv, gate and up, or both. Weight and bias hold the same spec."""

    input, output, dim, attribute = "whole", "split", 0, "_tp_packed_col_blocks"

    def specs(self, module: nn.Module) -> Specs:
        linear = _linear(module)
        spec = ShardSpec.of(0, linear.weight.shape[0], self.blocks_of(linear))
        return {"weight": spec} if linear.bias is None else {"weight": spec, "bias": spec}

    def shard(self, module: nn.Module, group: Group) -> nn.Module:
        linear = _linear(module)
        return ColwiseLinear.from_linear(linear, group=group, blocks=self.blocks_of(linear))


@dataclass(frozen=True)
class PackedRowwiseParallel(_Packed):
    """Columns cut block by block: the output projection of a concatenated input, such as attention and MLP."""

    input, output, dim, attribute = "split", "whole", 1, "_tp_packed_row_blocks"
    collective = "all-reduce"

    def specs(self, module: nn.Module) -> Specs:
        linear = _linear(module)
        return {"weight": ShardSpec.of(1, linear.weight.shape[1], self.blocks_of(linear))}

    def shard(self, module: nn.Module, group: Group) -> nn.Module:
        linear = _linear(module)
        return RowwiseLinear.from_linear(linear, group=group, blocks=self.blocks_of(linear))


class _Colwise(PackedColwiseParallel):
    """`"colwise"`: the packed style with a single block."""

    def blocks_of(self, linear: nn.Linear) -> Sequence[int]:
        return [1]


class _ColwiseGather(_Colwise):
    """`"colwise_gather"`: colwise, then all-gathered; for a layer whose reader needs all of it."""

    output, collective = "whole", "all-gather"

    def shard(self, module: nn.Module, group: Group) -> nn.Module:
        return ColwiseLinear.from_linear(_linear(module), group=group, gather=True)


class _Rowwise(PackedRowwiseParallel):
    """`"rowwise"`: the packed style with a single block."""

    def blocks_of(self, linear: nn.Linear) -> Sequence[int]:
        return [1]


class _RowwiseSplitInput(_Rowwise):
    """`"rowwise_split_input"`: each rank uses its own part of a whole input."""

    input = "whole"

    def shard(self, module: nn.Module, group: Group) -> nn.Module:
        return RowwiseLinear.from_linear(_linear(module), group=group, split_input=True)


class _RMSNorm(Style):
    """`"rms_norm"`: an RMSNorm over a split dim, normalised over the full width."""

    input, output, collective = "split", "split", "all-reduce of squares"

    def specs(self, module: nn.Module) -> Specs:
        spec = ShardSpec.of(0, norm_width(module))
        return {name: spec for name, _ in module.named_parameters(recurse=False)}

    def counts(self, module: nn.Module) -> Mapping[str, int]:
        return {"width": norm_width(module)}

    def payload(self, module: nn.Module) -> int:
        return 4  # one float32

    def shard(self, module: nn.Module, group: Group) -> nn.Module:
        return AcrossRMSNorm.from_norm(module, group=group)


class _HeadParameters(Style):
    """`"replicated_with_grad_allreduce"`: whole parameters that each rank applies to its own heads (a q/k norm).

    Their values stay whole; every rank sees the gradient of its own heads only, so the gradients are summed.
    """

    def watch(self, module: nn.Module, group: Group) -> None:
        for parameter in module.parameters():
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
        return cast(Mapping[str, int], found)

    def shard(self, module: nn.Module, group: Group) -> nn.Module:
        for name, value in self.counts(module).items():
            # A count is cut as a dim of that extent is: in equal parts.
            setattr(module, name, ShardSpec.of(0, value).local_shape([value], group.size)[0])
        return module


@dataclass(frozen=True)
class _Slicer:
    """The forward hook of `SliceOutput`, a class so that a sharded model can be copied and pickled."""

    dim: int
    group: Group

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, torch.Tensor):
            return split(output, self.group, ShardSpec.of(self.dim, output.shape[self.dim]))
        if isinstance(output, tuple | list):
            return type(output)(self(module, args, item) for item in output)
        return output


@dataclass(frozen=True)
class SliceOutput(Style):
    """Slices the tensors a module returns along `dim`: rotary tables that carry heads or channels."""

    dim: int
    output = "split"

    def shard(self, module: nn.Module, group: Group) -> nn.Module:
        module.register_forward_hook(_Slicer(self.dim, group))
        return module


@dataclass(frozen=True)
class ShardParameter(Style):
    """Shards a bare `nn.Parameter` along `dim`; its plan key is the parameter's own path."""

    dim: int
    blocks: Sequence[int] | None = None

    def parameter_spec(self, parameter: torch.Tensor) -> ShardSpec:
        if not -parameter.dim() <= self.dim < parameter.dim():
            raise ValueError(f"it has shape {tuple(parameter.shape)}, without a dim {self.dim}")
        return ShardSpec.of(self.dim, parameter.shape[self.dim], self.blocks)

    def shard_parameter(self, parameter: nn.Parameter, group: Group) -> nn.Parameter:
        """This rank's shard, as a parameter of its own."""
        return shard_parameter(parameter, self.parameter_spec(parameter), group)


STYLES: dict[str, Style] = {
    "colwise": _Colwise(),
    "rowwise": _Rowwise(),
    "rowwise_split_input": _RowwiseSplitInput(),
    "colwise_gather": _ColwiseGather(),
    "rms_norm": _RMSNorm(),
    "replicated_with_grad_allreduce": _HeadParameters(),
}
_NAMES = {id(style): name for name, style in STYLES.items()}
_MARKERS = {"PackedColwiseParallel": PackedColwiseParallel, "PackedRowwiseParallel": PackedRowwiseParallel}


def label(style: Style) -> str:
    """How a plan would write `style`."""
    return _NAMES.get(id(style)) or repr(style)


def style_of(value: Any) -> Style:
    """The style a plan's value stands for: a name, one of our markers, or a diffusers marker as it is.

    Raises:
        ValueError: the value is none of these.
    """
    if isinstance(value, Style):
        return value
    if isinstance(value, str) and value in STYLES:
        return STYLES[value]
    marker = _MARKERS.get(type(value).__name__)
    if marker is not None and hasattr(value, "blocks"):
        return marker(value.blocks)
    raise ValueError(
        f"unknown style {value!r}; the styles are {', '.join(map(repr, STYLES))}, PackedColwiseParallel(blocks), "
        f"PackedRowwiseParallel(blocks), Divide(names), SliceOutput(dim), ShardParameter(dim)"
    )
