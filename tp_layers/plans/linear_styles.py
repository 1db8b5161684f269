"""The styles of linear layers, and of convolutions of one group: colwise and rowwise, plain and packed.

A convolution's output channels are cut as a linear layer's rows are, its input channels as columns.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from ..group import Group
from ..layers.conv import ColwiseConv, Conv, RowwiseConv, plain_conv
from ..layers.linear import ColwiseLinear, RowwiseLinear, plain_linear
from ..layers.options import DEFAULT, Options
from .spec import ShardSpec
from .style import Specs, Style

Blocks = Sequence[int] | Callable[[Any], Sequence[int]] | None


def colwise(module: nn.Module, **how: Any) -> nn.Module:
    """The `ColwiseLinear` or `ColwiseConv` of a plain `module`."""
    if isinstance(module, Conv):
        return ColwiseConv.from_conv(module, **how)
    return ColwiseLinear.from_linear(plain_linear(module), **how)


def rowwise(module: nn.Module, **how: Any) -> nn.Module:
    """The `RowwiseLinear` or `RowwiseConv` of a plain `module`."""
    if isinstance(module, Conv):
        return RowwiseConv.from_conv(module, **how)
    return RowwiseLinear.from_linear(plain_linear(module), **how)


@dataclass(frozen=True)
class _Packed(Style):
    """A layer cut by blocks: proportions or absolute sizes, a callable of the layer, or left on the layer."""

    blocks: Blocks = None
    dim: ClassVar[int]
    attribute: ClassVar[str]

    def pinned(self, target: Any) -> Style:
        return replace(self, blocks=self.blocks_of(target)) if callable(self.blocks) else self

    def plain(self, module: nn.Module) -> Any:
        """`module`, if the style fits it."""
        return plain_conv(module) if isinstance(module, Conv) else plain_linear(module)

    def specs(self, module: nn.Module) -> Specs:
        layer = self.plain(module)
        spec = ShardSpec.of(self.dim, layer.weight.shape[self.dim], self.blocks_of(layer), self.granules)
        # Rows have their bias.
        return {"weight": spec, "bias": spec} if self.dim == 0 and layer.bias is not None else {"weight": spec}

    def blocks_of(self, layer: Any) -> Sequence[int]:
        blocks = self.blocks(layer) if callable(self.blocks) else self.blocks
        if blocks is None:
            blocks = getattr(layer, self.attribute, None)
        if not blocks:
            raise ValueError(
                f"{type(self).__name__} has no blocks: pass them, as in {type(self).__name__}([1, 1]), or set "
                f"`{self.attribute}` on the Linear"
            )
        return blocks


@dataclass(frozen=True)
class PackedColwiseParallel(_Packed):
    """Rows cut block by block: fused qkv, gate and up, or both. Weight and bias hold the same spec."""

    input, output, dim, attribute = "whole", "split", 0, "_tp_packed_col_blocks"

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        return colwise(module, group=group, granules=self.granules, blocks=self.blocks_of(module), options=options)


@dataclass(frozen=True)
class PackedRowwiseParallel(_Packed):
    """Columns cut block by block: the output projection of a concatenated input, such as attention and MLP."""

    input, output, dim, attribute = "split", "whole", 1, "_tp_packed_row_blocks"
    collective: ClassVar[str | None] = "all-reduce"

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        return rowwise(module, group=group, granules=self.granules, blocks=self.blocks_of(module), options=options)


class Colwise(PackedColwiseParallel):
    """`"colwise"`: the packed style with a single block."""

    def blocks_of(self, layer: Any) -> Sequence[int]:
        return [1]


class ColwiseGather(Colwise):
    """`"colwise_gather"`: colwise, then all-gathered; for a layer whose reader needs all of it."""

    output, collective = "whole", "all-gather"

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        return colwise(module, group=group, granules=self.granules, gather=True, options=options)


class Rowwise(PackedRowwiseParallel):
    """`"rowwise"`: the packed style with a single block."""

    def blocks_of(self, layer: Any) -> Sequence[int]:
        return [1]


class RowwiseSplitInput(Rowwise):
    """`"rowwise_split_input"`: each rank uses its own part of a whole input."""

    input = "whole"

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        return rowwise(module, group=group, granules=self.granules, split_input=True, options=options)
