"""Sharded linear layers: `ColwiseLinear` holds rows of the full weight, `RowwiseLinear` columns.

Neither is an `nn.Linear`, so that code which would treat a shard as a full layer (an adapter library, a quantiser)
refuses it; both have its attributes and state-dict keys. `in_features` is the width `forward` takes on this rank,
`out_features` the width it returns, `weight` and `bias` are this rank's shards.
"""

from collections.abc import Sequence

import torch
from torch import nn

from ..collectives import all_gather, all_reduce, replicate, split
from ..group import Group, GroupLike
from ..kernels.colwise import colwise
from ..kernels.rowwise import rowwise
from ..plans.spec import ShardSpec


def shard_parameter(parameter: torch.Tensor, spec: ShardSpec, group: Group) -> nn.Parameter:
    """This rank's shard of `parameter` under `spec`, as a parameter of its own."""
    return nn.Parameter(spec.take(parameter.detach(), group.rank, group.size), parameter.requires_grad)


class ShardedLinear(nn.Module):
    """What the two layers share: the group, the spec of the sharded dim, and how they print."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, spec: ShardSpec, group: Group) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.spec, self.group = spec, group
        # The same cut, of an activation's last dim.
        self.features = ShardSpec(-1, spec.blocks)

    def extra_repr(self) -> str:
        """As `nn.Linear` prints itself, with the place of the shard."""
        blocks = f" in blocks {self.spec.blocks}" if len(self.spec.blocks) > 1 else ""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"rank {self.group.rank} of {self.group.size}, dim {self.spec.dim} of {self.spec.length}{blocks}"
        )


class ColwiseLinear(ShardedLinear):
    """`x [.., K]`, whole -> `y [.., N / size]`, this rank's part of each block; with `gather` the whole `y [.., N]`."""

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, spec: ShardSpec, group: Group, gather: bool = False
    ) -> None:
        super().__init__(weight, bias, spec, group)
        self.gather = gather
        self.in_features = weight.shape[1]
        self.out_features = spec.length if gather else weight.shape[0]

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: GroupLike = None,
        blocks: Sequence[int] | None = None,
        gather: bool = False,
    ) -> "ColwiseLinear":
        """This rank's rows of `linear`, weight and bias cut by one and the same spec.

        Raises:
            ValueError: the blocks' sum does not divide `out_features`, or a block is not divisible by the group's size.
        """
        group = Group.of(group)
        spec = ShardSpec.of(0, linear.weight.shape[0], blocks)
        weight = shard_parameter(linear.weight, spec, group)
        bias = None if linear.bias is None else shard_parameter(linear.bias, spec, group)
        return cls(weight, bias, spec, group, gather)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., K]` -> `[.., out_features]`."""
        y = colwise(replicate(x, self.group), self.weight, self.bias)
        return all_gather(y, self.group, self.features) if self.gather else y


class RowwiseLinear(ShardedLinear):
    """`x [.., K / size]`, this rank's part of each block -> `y [.., N]`, whole, by one all-reduce.

    With `split_input` the layer takes a whole `x [.., K]` and uses its own part of it. The bias is whole on every rank
    and enters the sum on the group's rank 0.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, spec: ShardSpec, group: Group, split_input: bool = False
    ) -> None:
        super().__init__(weight, bias, spec, group)
        self.split_input = split_input
        self.in_features = spec.length if split_input else weight.shape[1]
        self.out_features = weight.shape[0]

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: GroupLike = None,
        blocks: Sequence[int] | None = None,
        split_input: bool = False,
    ) -> "RowwiseLinear":
        """This rank's columns of `linear`, and its whole bias.

        Raises:
            ValueError: the blocks' sum does not divide `in_features`, or a block is not divisible by the group's size.
        """
        group = Group.of(group)
        spec = ShardSpec.of(1, linear.weight.shape[1], blocks)
        return cls(shard_parameter(linear.weight, spec, group), linear.bias, spec, group, split_input)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., in_features]` -> `[.., N]`.

        Raises:
            ValueError: the width of `x` is not `in_features`.
        """
        if x.shape[-1] != self.in_features:
            whole = x.shape[-1] == self.spec.length
            raise ValueError(
                f"this rowwise layer takes {self.in_features} of {self.spec.length} columns on each of "
                f"{self.group.size} ranks, its input has {x.shape[-1]}: "
                f"{'a whole input is for rowwise_split_input' if whole else 'check the layer that feeds it'}"
            )
        if self.split_input:
            x = split(x, self.group, self.features)
        return all_reduce(rowwise(x, self.weight, self.bias, add_bias=self.group.rank == 0), self.group)
