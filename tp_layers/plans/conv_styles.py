"""The style of depthwise convolutions; those of one group take the styles of linear layers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..group import Group
from ..layers.conv import DepthwiseConv, plain_conv
from ..layers.options import DEFAULT, Options
from .linear_styles import PackedColwiseParallel


@dataclass(frozen=True)
class PackedDepthwise(PackedColwiseParallel):
    """A filter for each channel, cut as the packed colwise layer that gives the channels."""

    input = "split"

    def plain(self, module: nn.Module) -> Any:
        return plain_conv(module, depthwise=True)

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        how = {"blocks": self.blocks_of(module), "granules": self.granules}
        return DepthwiseConv.from_conv(module, group=group, options=options, **how)


class Depthwise(PackedDepthwise):
    """`"depthwise"`: the packed style with a single block."""

    def blocks_of(self, layer: Any) -> Sequence[int]:
        return [1]
