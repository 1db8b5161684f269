"""Sharded linear layers: `ColwiseLinear` holds rows of the full weight, `RowwiseLinear` columns.

Neither is an `nn.Linear`, so that code which would treat a shard as a full layer (an adapter library, a quantiser)
refuses it; both have its attributes and state-dict keys. `in_features` is the width `forward` takes on this rank,
`out_features` the width it returns, `weight` and `bias` are this rank's shards.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..collectives import all_gather, all_reduce, replicate, split, summed_in
from ..group import Group, GroupLike
from ..kernels.colwise import colwise
from ..kernels.rowwise import rowwise
from ..plans.spec import ShardSpec
from .epilogue import Epilogue
from .low_rank import Adaptable, LowRank, add_adapters, add_ups, downs
from .options import DEFAULT, Options
from .overlap import Overlap, memory
from .sharded import ShardedLayer
from .streams import Streams
from .together import Together


def plain_linear(module: nn.Module) -> nn.Linear:
    """`module`, if it computes `x @ weight.T + bias` of two plain parameters and nothing else.

    Raises:
        ValueError: it is no nn.Linear, has a forward or a call of its own (a quantised or adapter layer).
    """
    kind = type(module)
    if not isinstance(module, nn.Linear) or (kind.forward, kind.__call__) != (nn.Linear.forward, nn.Linear.__call__):
        raise ValueError(f"it is a {type(module).__name__}, not a plain nn.Linear")
    return module


class ShardedLinear(Adaptable, ShardedLayer):
    """What the two layers share: the same cut of an activation's last dim, adapters by name, and how they print."""

    in_features: int
    out_features: int

    def __init__(self, linear: nn.Linear, spec: ShardSpec, group: Group, options: Options) -> None:
        super().__init__(plain_linear(linear), spec, group, options)
        self.features = replace(spec, dim=-1)
        self.adapters: dict[str, LowRank] = {}

    def extra_repr(self) -> str:
        """As `nn.Linear` prints itself, with the place of the shard."""
        size = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return f"{size}, {self.place}"


class ColwiseLinear(ShardedLinear):
    """`x [.., K]`, whole -> `y [.., N / size]`, this rank's part of each block; with `gather` the whole `y [.., N]`.

    A block of fewer granules than ranks (kv heads) is replicated: the gradient that a rank gets is of its own readers
    only, so that of a row of weight or bias is the sum over the ranks that hold it (see `sum_gradient`).
    """

    # False within a module whose inputs' gradients are summed where they enter it.
    sums_gradient = True
    # Other layers that take the same input, see `together.py`.
    together: Together | None = None

    def __init__(
        self, linear: nn.Linear, spec: ShardSpec, group: Group, gather: bool = False, options: Options = DEFAULT
    ) -> None:
        super().__init__(linear, spec, group, options)
        self.weight = self.cut(linear.weight)
        self.register_parameter("bias", None if linear.bias is None else self.cut(linear.bias))
        self.gather = gather
        self.in_features = linear.weight.shape[1]
        self.out_features = spec.length if gather else self.local

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: GroupLike = None,
        blocks: Sequence[int] | None = None,
        granules: Sequence[int] | None = None,
        gather: bool = False,
        options: Options = DEFAULT,
    ) -> "ColwiseLinear":
        """This rank's rows of `linear`, weight and bias cut by one and the same spec.

        Raises:
            ValueError: the blocks' sum does not divide `out_features`, or a block is not divisible by the group's size
                or not made of its `granules` (see `ShardSpec`).
        """
        spec = ShardSpec.of(0, linear.weight.shape[0], blocks, granules)
        return cls(linear, spec, Group.of(group), gather, options)

    def forward(self, x: torch.Tensor, epilogue: Epilogue | None = None) -> Any:
        """`x [.., K]` -> `[.., out_features]`, or what the caller's `epilogue` makes of it."""
        self.check_in_place()
        if self.together is not None:
            y = self.together.take(self, x, epilogue)
            if y is not None:
                return y
        x, backend = replicate(x, self.group) if self.sums_gradient else x, self.options.backend
        if epilogue is not None and not (self.gather or self.adapters):
            return epilogue.project(x, self.weight, self.bias, self.parts, backend)
        y = colwise(x, self.weight, self.bias, ranges=self.ranges, backend=backend)
        y = add_adapters(y, x, self.adapters)
        y = all_gather(y, self.group, self.features) if self.gather else y
        return y if epilogue is None else epilogue.after(y, self.parts)

    def extra_repr(self) -> str:
        """As that of all sharded layers, and whether it is computed with others."""
        return super().extra_repr() + ("" if self.together is None else ", in one GEMM with others of the same input")


class RowwiseLinear(ShardedLinear):
    """`x [.., K / size]`, this rank's part of each block -> `y [.., N]`, whole, by one all-reduce.

    With `split_input` the layer takes a whole `x [.., K]` and uses its own part of it. The bias is whole on every rank
    and enters the sum on the group's rank 0. Without `reduce` the partial sum is returned as it is.
    """

    # Set where the sum over ranks is taken while something else is computed.
    overlap: Overlap | None = None
    # This layer and that of another stream, whose outputs are summed together, see `streams.py`.
    streams: Streams | None = None

    def __init__(
        self,
        linear: nn.Linear,
        spec: ShardSpec,
        group: Group,
        split_input: bool = False,
        reduce: bool = True,
        options: Options = DEFAULT,
    ) -> None:
        super().__init__(linear, spec, group, options)
        spec.require_disjoint(group.size)
        self.weight = self.cut(linear.weight)
        self.register_parameter("bias", linear.bias)
        self.split_input, self.reduce = split_input, reduce
        self.in_features = spec.length if split_input else self.local
        self.out_features = linear.weight.shape[0]

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        group: GroupLike = None,
        blocks: Sequence[int] | None = None,
        granules: Sequence[int] | None = None,
        split_input: bool = False,
        reduce: bool = True,
        options: Options = DEFAULT,
    ) -> "RowwiseLinear":
        """This rank's columns of `linear`, and its whole bias.

        Raises:
            ValueError: the blocks' sum does not divide `in_features`, or a block is not divisible by the group's size
                or not made of its `granules` (see `ShardSpec`), or has fewer of them than there are ranks.
        """
        spec = ShardSpec.of(1, linear.weight.shape[1], blocks, granules)
        return cls(linear, spec, Group.of(group), split_input, reduce, options)

    def forward(self, x: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        """`x [.., in_features]`, or several inputs that add up to that width and are not concatenated -> `[.., N]`.

        Raises:
            ValueError: the width of `x` is not `in_features`, or a whole input comes in several parts.
        """
        self.check_in_place()
        self._check_width(x)
        if self.split_input:
            if not isinstance(x, torch.Tensor):
                raise ValueError("rowwise_split_input takes one whole input, not several")
            x = split(x, self.group, self.features)
        dtype, wide = self.weight.dtype, None
        if self.reduce and self.options.reduce_dtype is not None:
            if torch.is_autocast_enabled(self.weight.device.type):
                dtype = torch.get_autocast_dtype(self.weight.device.type)
            wide = summed_in(self.options.reduce_dtype, dtype, self.group)
        y = None if self.streams is None else self.streams.take(self, x, wide)
        if y is None and self.overlap is not None:
            y = self.overlap.reduced(self, x, wide)
        elif y is None:
            y = self.partial_sum(x, wide, memory(self, x, wide) if self.reduce else None)
            y = all_reduce(y, self.group) if self.reduce else y
        return y if wide is None else y.to(dtype)

    def partial_sum(
        self, x: torch.Tensor | Sequence[torch.Tensor], wide: torch.dtype | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """What this rank adds to `y [.., N]`, in the dtype `wide` if there is one; into `out` if there is one."""
        first = self.group.rank == 0
        how: dict[str, Any] = dict(ranges=self.ranges, out=out, out_dtype=wide, backend=self.options.backend)
        y = rowwise(x, self.weight, self.bias, first, **how)
        return add_adapters(y, x, self.adapters, add_bias=first)

    def partial_sums(
        self, x: torch.Tensor | Sequence[torch.Tensor], wide: torch.dtype | None, parts: Sequence[slice]
    ) -> Iterator[torch.Tensor]:
        """The same for one part of N after the other, each computed when it is asked for; nothing is differentiated."""
        first, low = self.group.rank == 0, downs(x, self.adapters)
        how: dict[str, Any] = dict(ranges=self.ranges, out_dtype=wide, backend=self.options.backend)
        for part in parts:
            bias, out = None if self.bias is None else self.bias[part], memory(self, x, wide, part.stop - part.start)
            y = rowwise(x, self.weight[part], bias, first, out=out, **how)
            yield add_ups(y, low, self.adapters, first, part)

    def _check_width(self, x: torch.Tensor | Sequence[torch.Tensor]) -> None:
        width = x.shape[-1] if isinstance(x, torch.Tensor) else sum(part.shape[-1] for part in x)
        if width == self.in_features:
            return
        whole = width == self.spec.length
        raise ValueError(
            f"this rowwise layer takes {self.in_features} of {self.spec.length} columns on each of "
            f"{self.group.size} ranks, its input has {width}: "
            f"{'a whole input is for rowwise_split_input' if whole else 'check the layer that feeds it'}"
        )
