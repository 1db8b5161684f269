"""`AcrossRMSNorm`: an RMSNorm over a dim whose channels are split over the ranks."""

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import nn

from ..collectives import all_reduce
from ..group import Group, GroupLike
from ..kernels.rms_norm import scale, sum_of_squares
from ..plans.spec import ShardSpec
from .options import DEFAULT, Options
from .sharded import shard_parameter


class AcrossRMSNorm(nn.Module):
    """`x [.., D / size]` -> the same channels of the norm over all D: one float32 scalar per row is all-reduced.

    Channels that several ranks hold (of kv heads) are in the sum as often, so the mean is over as many times D.

    A norm over the local channels alone raises no error and is off by the spread between the ranks, 4 to 25 % on
    random weights.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    # How two norms get their squares together, see `pair.py`.
    together: Callable[["AcrossRMSNorm", torch.Tensor], torch.Tensor] | None = None

    def __init__(
        self,
        weight: nn.Parameter | None,
        bias: nn.Parameter | None,
        spec: ShardSpec,
        group: Group,
        eps: float | None,
        round_first: bool,
        options: Options,
    ) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.spec, self.group, self.eps, self.round_first = spec, group, eps, round_first
        self.options, self.local = options, spec.extent(group.rank, group.size)

    @classmethod
    def from_norm(
        cls,
        norm: nn.Module,
        *,
        group: GroupLike = None,
        granules: Sequence[int] | None = None,
        options: Options = DEFAULT,
    ) -> "AcrossRMSNorm":
        """From `torch.nn.RMSNorm` or diffusers' RMSNorm over one dim.

        Raises:
            ValueError: any other module, or a norm over several dims, or a width not divisible by the group's size or
                not made of its `granules` (see `ShardSpec`).
        """
        group = Group.of(group)
        spec, weight, bias = shards_of(norm, norm_width(norm), group, granules)
        round_first = not isinstance(norm, nn.RMSNorm)
        return cls(weight, bias, spec, group, cast(float | None, norm.eps), round_first, options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., D / size]` -> the same shape and dtype as the norm it replaces."""
        squares = self.together(self, x) if self.together is not None else self.reduced(self.squares(x))
        # torch's default is the epsilon of the dtype it computes in, float32 for half precision, not of x's.
        eps = torch.finfo(squares.dtype).eps if self.eps is None else self.eps
        width = self.spec.length * self.spec.copies(self.group.size)
        return scale(x, squares, width, eps, self.weight, self.bias, self.round_first, backend=self.options.backend)

    def squares(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's sum of squares, `[.., 1]`.

        Raises:
            ValueError: `x` has another width than this rank's channels.
        """
        if x.shape[-1] != self.local:
            raise ValueError(
                f"this norm takes {self.local} of {self.spec.length} channels, its input has {x.shape[-1]}"
            )
        return sum_of_squares(x, backend=self.options.backend)

    def reduced(self, squares: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' `squares`, of any shape, in their place."""
        return all_reduce(squares, self.group, consumer="split")

    def extra_repr(self) -> str:
        """The full width, the place of the shard, and whether another norm's squares are reduced along."""
        with_whom = "" if self.together is None else ", its squares reduced together with the other norm's"
        return f"{self.spec.length}, eps={self.eps}, rank {self.group.rank} of {self.group.size}{with_whom}"


def shards_of(
    norm: nn.Module, width: int, group: Group, granules: Sequence[int] | None
) -> tuple[ShardSpec, nn.Parameter | None, nn.Parameter | None]:
    """How the `width` channels of a norm are cut, and this rank's shards of its weight and bias.

    Raises:
        ValueError: the width is not divisible by the group's size, or not made of its `granules`.
    """
    spec = ShardSpec.of(0, width, granules=granules)
    # A norm without parameters would otherwise check its width only in forward.
    spec.ranges(group.rank, group.size)
    parameters = (norm._parameters.get("weight"), norm._parameters.get("bias"))
    weight, bias = (None if it is None else shard_parameter(it, spec, group) for it in parameters)
    return spec, weight, bias


def norm_width(norm: nn.Module) -> int:
    """The number of channels an RMSNorm of torch or diffusers normalises.

    Raises:
        ValueError: `norm` is neither, or normalises several dims.
    """
    home, name = type(norm).__module__, type(norm).__name__
    # Many a library has an RMSNorm of its own, with another formula (1 + weight) under the same name.
    if name != "RMSNorm" or home not in ("torch.nn.modules.normalization", "diffusers.models.normalization"):
        raise ValueError(f"'rms_norm' shards torch.nn.RMSNorm and diffusers' RMSNorm, not {name} of {home}")
    shape = cast(Sequence[int], norm.normalized_shape if isinstance(norm, nn.RMSNorm) else norm.dim)
    if len(shape) != 1:
        raise ValueError(f"'rms_norm' shards a norm over one dim, this one is over {tuple(shape)}")
    return int(shape[0])
