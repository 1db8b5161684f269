"""Sharded convolutions: of a full weight `[O, C / groups, *kernel]` a `ColwiseConv` holds output channels, a
`RowwiseConv` input channels, and a `DepthwiseConv`, which has a filter for each channel, filters.

    x  [B, C, *extents], or [C, *extents] without a batch; any strides
    y  [B, O, *extents], with the strides that torch gives it

The dtype rule is torch's, one dtype in and out; a partial sum that is reduced in a wider dtype is computed in it too.
They are torch's convolutions, whatever the backend. None is an `nn.Conv2d` or the like, but has its attributes and
state-dict keys; `in_channels` and `out_channels` are those that `forward` takes and returns on this rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..collectives import all_gather, all_reduce, once, replicate, split, summed_in
from ..group import Group, GroupLike
from ..plans.spec import ShardSpec
from .options import DEFAULT, Options
from .sharded import ShardedLayer

Conv = nn.Conv1d | nn.Conv2d | nn.Conv3d
# By the number of extents.
CONVOLVE: tuple[Callable[..., torch.Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)


def plain_conv(module: nn.Module, depthwise: bool = False) -> Conv:
    """`module`, if it convolves with two plain parameters and zeros around, all channels or (`depthwise`) each alone.

    Raises:
        ValueError: it is no nn.Conv1d, 2d or 3d, has a forward of its own, other groups, or pads with other values.
    """
    kind: Any = next((kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(module, kind)), None)
    own = ("forward", "_conv_forward")
    if kind is None or any(getattr(type(module), name) is not getattr(kind, name) for name in own):
        raise ValueError(f"it is a {type(module).__name__}, not a plain nn.Conv1d, nn.Conv2d or nn.Conv3d")
    conv: Conv = module  # type: ignore[assignment]
    channels = (conv.in_channels, conv.out_channels)
    if channels != (conv.groups, conv.groups) if depthwise else conv.groups != 1:
        raise ValueError(
            f"it convolves {channels[0]} channels to {channels[1]} in {conv.groups} groups: 'depthwise' is for as many "
            f"groups as there are channels on either side, the other styles are for one group"
        )
    if conv.padding_mode != "zeros":
        raise ValueError(f"its padding mode is {conv.padding_mode!r}, only 'zeros' can be sharded")
    return conv


class ShardedConv(ShardedLayer):
    """What the three layers share: how they convolve, where an activation has its channels (`dim`), how they print."""

    in_channels: int
    out_channels: int

    def __init__(self, conv: Conv, spec: ShardSpec, group: Group, options: Options) -> None:
        super().__init__(conv, spec, group, options)
        self.kernel_size, self.stride, self.padding = conv.kernel_size, conv.stride, conv.padding
        self.dilation, self.groups, self.dim = conv.dilation, conv.groups, -1 - len(conv.kernel_size)
        self.weight = self.cut(conv.weight)
        self.features = replace(spec, dim=self.dim)

    def check(self, x: torch.Tensor) -> None:
        """Raises ValueError unless `x` has `in_channels`, or where `check_in_place` does."""
        self.check_in_place()
        if x.shape[self.dim] != self.in_channels:
            raise ValueError(
                f"this convolution takes {self.in_channels} channels on each of {self.group.size} ranks, its input has "
                f"{x.shape[self.dim]}: check the layer that feeds it"
            )

    def mine(self, parameter: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter that the spec cuts."""
        return parameter if self.ranges is None else self.spec.view(parameter, self.group.rank, self.group.size)

    def convolve(self, x: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x` under this rank's part of the weight and a `bias` for it; computed in `dtype`, if one is given."""
        weight = self.mine(self.weight)
        function, how = CONVOLVE[-2 - self.dim], (self.stride, self.padding, self.dilation, self.groups)
        if dtype is None:
            return function(x, weight, bias, *how)
        # Autocast would narrow the operands again.
        with torch.autocast(x.device.type, enabled=False):
            return function(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype), *how)

    def collected(self, y: torch.Tensor, collective: Callable[[torch.Tensor, ShardSpec], torch.Tensor]) -> torch.Tensor:
        """`collective` of `y` and of the cut of its channels, in one order of memory on all ranks: channels last.

        What it returns has the order of `y`, which on a rank of one channel is contiguous whatever its strides: the
        channels' stride alone tells all ranks the same.
        """
        last = y.stride(self.dim) == 1
        y = collective(y.movedim(self.dim, -1).contiguous(), replace(self.spec, dim=-1)).movedim(-1, self.dim)
        return y if last else y.contiguous()

    def extra_repr(self) -> str:
        """As torch's convolutions begin, with the place of the shard."""
        size = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}, stride={self.stride}"
        return f"{size}, groups={self.groups}, bias={self.bias is not None}, {self.place}"


class ColwiseConv(ShardedConv):
    """`x` whole -> this rank's output channels, its part of each block; with `gather` all of them."""

    # False within a module whose inputs' gradients are summed where they enter it.
    sums_gradient = True

    def __init__(
        self, conv: Conv, spec: ShardSpec, group: Group, gather: bool = False, options: Options = DEFAULT
    ) -> None:
        super().__init__(plain_conv(conv), spec, group, options)
        self.register_parameter("bias", None if conv.bias is None else self.cut(conv.bias))
        self.gather = gather
        self.in_channels, self.out_channels = conv.in_channels, spec.length if gather else self.local

    @classmethod
    def from_conv(
        cls,
        conv: nn.Module,
        *,
        group: GroupLike = None,
        blocks: Sequence[int] | None = None,
        granules: Sequence[int] | None = None,
        gather: bool = False,
        options: Options = DEFAULT,
    ) -> "ColwiseConv":
        """This rank's output channels of `conv`, which has one group; weight and bias cut by one and the same spec.

        Raises:
            ValueError: `plain_conv` refuses it, or its channels do not divide.
        """
        conv = plain_conv(conv)
        return cls(conv, ShardSpec.of(0, conv.out_channels, blocks, granules), Group.of(group), gather, options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [B, C, *]` -> `[B, out_channels, *]`."""
        self.check(x)
        x = replicate(x, self.group) if self.sums_gradient else x
        y = self.convolve(x, None if self.bias is None else self.mine(self.bias))
        return self.collected(y, lambda y, spec: all_gather(y, self.group, spec)) if self.gather else y


class RowwiseConv(ShardedConv):
    """This rank's input channels, its part of each block -> all output channels, by one all-reduce.

    With `split_input` the layer takes all channels and uses its own. The bias is whole on every rank and enters the
    sum on the group's rank 0. Without `reduce` the partial sum is returned as it is.
    """

    def __init__(
        self,
        conv: Conv,
        spec: ShardSpec,
        group: Group,
        split_input: bool = False,
        reduce: bool = True,
        options: Options = DEFAULT,
    ) -> None:
        super().__init__(plain_conv(conv), spec, group, options)
        spec.require_disjoint(group.size)
        self.register_parameter("bias", conv._parameters["bias"])
        self.split_input, self.reduce = split_input, reduce
        self.in_channels, self.out_channels = spec.length if split_input else self.local, conv.out_channels

    @classmethod
    def from_conv(
        cls,
        conv: nn.Module,
        *,
        group: GroupLike = None,
        blocks: Sequence[int] | None = None,
        granules: Sequence[int] | None = None,
        split_input: bool = False,
        reduce: bool = True,
        options: Options = DEFAULT,
    ) -> "RowwiseConv":
        """This rank's input channels of `conv`, and its whole bias; any kernel, one group.

        Raises:
            ValueError: as `ColwiseConv.from_conv`, or a block has fewer `granules` than there are ranks.
        """
        conv = plain_conv(conv)
        return cls(
            conv, ShardSpec.of(1, conv.in_channels, blocks, granules), Group.of(group), split_input, reduce, options
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [B, in_channels, *]` -> `[B, O, *]`."""
        self.check(x)
        x = split(x, self.group, self.features) if self.split_input else x
        dtype = self.weight.dtype
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
        wide = summed_in(self.options.reduce_dtype, dtype, self.group) if self.reduce else None
        y = self.convolve(x, None if self.bias is None else once(self.bias, self.group), wide)
        if self.reduce:
            y = self.collected(y, lambda y, _: all_reduce(y, self.group))
        return y if wide is None else y.to(dtype)


class DepthwiseConv(ShardedConv):
    """This rank's channels, its part of each block -> the same channels, each under its own filter."""

    def __init__(self, conv: Conv, spec: ShardSpec, group: Group, options: Options = DEFAULT) -> None:
        super().__init__(plain_conv(conv, depthwise=True), spec, group, options)
        self.register_parameter("bias", None if conv.bias is None else self.cut(conv.bias))
        self.in_channels = self.out_channels = self.groups = self.local

    @classmethod
    def from_conv(
        cls,
        conv: nn.Module,
        *,
        group: GroupLike = None,
        blocks: Sequence[int] | None = None,
        granules: Sequence[int] | None = None,
        options: Options = DEFAULT,
    ) -> "DepthwiseConv":
        """This rank's filters of `conv`, weight and bias cut by one and the same spec.

        Raises:
            ValueError: `plain_conv` refuses it, or its channels do not divide.
        """
        conv = plain_conv(conv, depthwise=True)
        return cls(conv, ShardSpec.of(0, conv.out_channels, blocks, granules), Group.of(group), options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [B, C / size, *]` -> the same channels."""
        self.check(x)
        return self.convolve(x, None if self.bias is None else self.mine(self.bias))
