"""What sharded linear layers and convolutions share: the place of the shard, and how they hold it."""

from typing import cast

import torch
from torch import nn

from ..group import Group
from ..plans.spec import ShardSpec
from .options import Options


def shard_parameter(parameter: torch.Tensor, spec: ShardSpec, group: Group) -> nn.Parameter:
    """This rank's shard of `parameter` under `spec`, as a parameter of its own."""
    return nn.Parameter(spec.take(parameter.detach(), group.rank, group.size), parameter.requires_grad)


class ShardedLayer(nn.Module):
    """A layer whose `weight` is this rank's shard; with `options.copy=False` the full one, of which `ranges` are its.

    `local` is the extent of the shard along the dim that `spec` cuts, `parts` where each block lies in what it holds.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, spec: ShardSpec, group: Group, options: Options) -> None:
        super().__init__()
        if "weight" not in layer._parameters:
            raise ValueError("its weight is parametrised, so it is computed; remove the parametrisation first")
        self.spec, self.group, self.options = spec, group, options
        mine = spec.ranges(group.rank, group.size)
        self.local = sum(stop - start for start, stop, _ in mine)
        self.ranges = None if options.copy else [(start, stop) for start, stop, _ in mine]
        self.parts = [part.held for part in mine] if self.ranges is None else self.ranges

    def cut(self, parameter: torch.Tensor) -> nn.Parameter:
        """What the layer holds of a parameter that its spec cuts."""
        if self.options.copy:
            return shard_parameter(parameter, self.spec, self.group)
        return cast(nn.Parameter, parameter)

    def check_in_place(self) -> None:
        """Raises ValueError where a full weight read in place would get the gradient of this rank's part only."""
        if self.ranges is None or not torch.is_grad_enabled():
            return
        if any(parameter.requires_grad for parameter in self.parameters()):
            raise ValueError("a layer with copy=False is for inference: use torch.no_grad(), or shard with copy=True")

    @property
    def place(self) -> str:
        """The place of the shard, in words."""
        blocks = f" in blocks {self.spec.blocks}" if len(self.spec.blocks) > 1 else ""
        return f"rank {self.group.rank} of {self.group.size}, dim {self.spec.dim} of {self.spec.length}{blocks}"
