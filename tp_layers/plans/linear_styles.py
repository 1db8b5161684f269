"""The styles of linear layers: colwise and rowwise, plain and packed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import nn

from ..group import Group
from ..layers.linear import ColwiseLinear, RowwiseLinear, plain_linear
from ..layers.options import DEFAULT, Options
from .spec import ShardSpec
from .style import Specs, Style

Blocks = Sequence[int] | Callable[[nn.Linear], Sequence[int]] | None


@dataclass(frozen=True)
class _Packed(Style):
    """A linear layer cut by blocks: proportions or absolute sizes, a callable of the Linear, or left on the Linear."""

    blocks: Blocks = None
    dim: ClassVar[int]
    attribute: ClassVar[str]

    def pinned(self, target: Any) -> Style:
        return replace(self, blocks=self.blocks_of(target)) if callable(self.blocks) else self

    def blocks_of(self, linear: nn.Linear) -> Sequence[int]:
        blocks = self.blocks(linear) if callable(self.blocks) else self.blocks
        if blocks is None:
            blocks = getattr(linear, self.attribute, None)
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

    def specs(self, module: nn.Module) -> Specs:
        linear = plain_linear(module)
        spec = ShardSpec.of(0, linear.weight.shape[0], self.blocks_of(linear), self.granules)
        return {"weight": spec} if linear.bias is None else {"weight": spec, "bias": spec}

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        linear = plain_linear(module)
        blocks = self.blocks_of(linear)
        return ColwiseLinear.from_linear(linear, group=group, blocks=blocks, granules=self.granules, options=options)


@dataclass(frozen=True)
class PackedRowwiseParallel(_Packed):
    """Columns cut block by block: the output projection of a concatenated input, such as attention and MLP."""

    input, output, dim, attribute = "split", "whole", 1, "_tp_packed_row_blocks"
    collective: ClassVar[str | None] = "all-reduce"

    def specs(self, module: nn.Module) -> Specs:
        linear = plain_linear(module)
        return {"weight": ShardSpec.of(1, linear.weight.shape[1], self.blocks_of(linear), self.granules)}

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        linear = plain_linear(module)
        blocks = self.blocks_of(linear)
        return RowwiseLinear.from_linear(linear, group=group, blocks=blocks, granules=self.granules, options=options)


class Colwise(PackedColwiseParallel):
    """`"colwise"`: the packed style with a single block."""

    def blocks_of(self, linear: nn.Linear) -> Sequence[int]:
        return [1]


class ColwiseGather(Colwise):
    """`"colwise_gather"`: colwise, then all-gathered; for a layer whose reader needs all of it."""

    output, collective = "whole", "all-gather"

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        linear = plain_linear(module)
        return ColwiseLinear.from_linear(linear, group=group, granules=self.granules, gather=True, options=options)


class Rowwise(PackedRowwiseParallel):
    """`"rowwise"`: the packed style with a single block."""

    def blocks_of(self, linear: nn.Linear) -> Sequence[int]:
        return [1]


class RowwiseSplitInput(Rowwise):
    """`"rowwise_split_input"`: each rank uses its own part of a whole input."""

    input = "whole"

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        linear = plain_linear(module)
        return RowwiseLinear.from_linear(linear, group=group, granules=self.granules, split_input=True, options=options)
