"""What a style is: the shards of a module's parameters, the module that holds them, and what goes in and out.

A tensor is *whole* (the same on every rank), *split* (each rank its part of the last dim), or *partial* (the ranks'
tensors add up to it). Every style names the state of its input and of its output, so that a plan can be checked before
it is carried out.
"""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn

from ..group import Group
from ..layers.options import DEFAULT, Options
from .spec import ShardSpec

Specs = dict[str, ShardSpec]


class Style:
    """One entry of a plan. Subclasses say what they shard (`specs`) and carry it out (`shard`)."""

    input: ClassVar[str | None] = None
    output: ClassVar[str | None] = None
    # The collective of one forward call, and its bytes per row: what describe() counts.
    collective: ClassVar[str | None] = None
    # Of each of `lengths`, into how many equal pieces it may be cut (see `ShardSpec`); None: equal parts, one a rank.
    granules: tuple[int, ...] | None = None

    def payload(self, target: Any) -> int:
        """Bytes per row of the input that the collective of `target` (full or sharded) carries."""
        width = target.out_features if hasattr(target, "out_features") else target.out_channels
        return width * target.weight.dtype.itemsize

    def specs(self, module: nn.Module) -> Specs:
        """The spec of every parameter of `module` that is sharded; a meta module is enough.

        Raises:
            ValueError: the style does not fit the module.
        """
        return {}

    def lengths(self, target: Any) -> Sequence[int]:
        """What `granules` are of: the blocks that the style cuts in `target`."""
        return next((spec.blocks for spec in self.specs(target).values()), ())

    def in_granules(self, granules: Sequence[int], target: Any) -> "Style":
        """The style, pinned to `target` and cutting it in `granules`.

        Raises:
            ValueError: it does not know how to.
        """
        made = copy.copy(self.pinned(target))
        object.__setattr__(made, "granules", tuple(granules))
        cuts = {(spec.blocks, spec.granules) for spec in made.specs(target).values()}
        if cuts and cuts != {(tuple(self.lengths(target)), made.granules)}:
            raise ValueError(f"{type(self).__name__} cannot be cut unevenly")
        return made

    def counts(self, module: nn.Module) -> Mapping[str, int]:
        """Further integers of `module` that the size must divide, by name."""
        return {}

    def pinned(self, target: Any) -> "Style":
        """The style for this one module, free of functions, so that it can be sent to another process."""
        return self

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        """The module to put in `module`'s place (possibly itself), holding this rank's shards."""
        return module

    def watch(self, target: nn.Module | nn.Parameter, group: Group) -> None:
        """What is left to do once the planned parameter, or those of the module `shard` returned, hold their values."""
