"""The styles of norms over a split dim, normalised over the full width."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from ..group import Group
from ..layers.layer_norm import AcrossLayerNorm, layer_norm_width
from ..layers.norm import AcrossRMSNorm, norm_width
from ..layers.options import DEFAULT, Options
from .spec import ShardSpec
from .style import Specs, Style


class RMSNorm(Style):
    """`"rms_norm"`: an RMSNorm."""

    input, output, collective = "split", "split", "all-reduce of squares"

    def width(self, module: nn.Module) -> int:
        """The channels that are normalised.

        Raises:
            ValueError: the style is for norms of another kind.
        """
        return norm_width(module)

    def specs(self, module: nn.Module) -> Specs:
        spec = ShardSpec.of(0, self.width(module), granules=self.granules)
        return {name: spec for name, _ in module.named_parameters(recurse=False)}

    def counts(self, module: nn.Module) -> Mapping[str, int]:
        return {"width": self.width(module)}

    def lengths(self, target: Any) -> Sequence[int]:
        return (self.width(target),)

    def payload(self, target: Any) -> int:
        return 4  # one float32

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        return AcrossRMSNorm.from_norm(module, group=group, granules=self.granules, options=options)


class LayerNorm(RMSNorm):
    """`"layer_norm"`: a LayerNorm, by two all-reduces."""

    collective = "all-reduces of sum and squares"

    def width(self, module: nn.Module) -> int:
        return layer_norm_width(module)

    def payload(self, target: Any) -> int:
        return 8  # two float32

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        return AcrossLayerNorm.from_norm(module, group=group, granules=self.granules, options=options)
