"""`AcrossLayerNorm`: a LayerNorm over a dim whose channels are split over the ranks."""

from collections.abc import Sequence

import torch
from torch import nn

from ..collectives import all_reduce
from ..group import Group, GroupLike
from ..plans.spec import ShardSpec
from .norm import shards_of
from .options import DEFAULT, Options


class AcrossLayerNorm(nn.Module):
    """`x [.., D / size]` -> the same channels of the norm over all D: twice, one float32 scalar per row is all-reduced.

    First the sum, then the squares of what is left without the mean: in one collective the variance would be the
    difference of two sums that a mean far from zero makes large. Channels that several ranks hold (of kv heads) are in
    both sums as often, so the means are over as many times D.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(
        self, weight: nn.Parameter | None, bias: nn.Parameter | None, spec: ShardSpec, group: Group, eps: float
    ) -> None:
        super().__init__()
        self.register_parameter("weight", weight)
        self.register_parameter("bias", bias)
        self.spec, self.group, self.eps = spec, group, eps
        self.local = spec.extent(group.rank, group.size)

    @classmethod
    def from_norm(
        cls,
        norm: nn.Module,
        *,
        group: GroupLike = None,
        granules: Sequence[int] | None = None,
        options: Options = DEFAULT,
    ) -> "AcrossLayerNorm":
        """From `torch.nn.LayerNorm` or diffusers' FP32LayerNorm over one dim; `options` change nothing.

        Raises:
            ValueError: any other module, or a norm over several dims, or a width not divisible by the group's size or
                not made of its `granules` (see `ShardSpec`).
        """
        group = Group.of(group)
        spec, weight, bias = shards_of(norm, layer_norm_width(norm), group, granules)
        return cls(weight, bias, spec, group, float(norm.eps))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., D / size]` -> the same shape and dtype, computed in float32 or wider.

        Raises:
            ValueError: `x` has another width.
        """
        if x.shape[-1] != self.local:
            raise ValueError(
                f"this norm takes {self.local} of {self.spec.length} channels, its input has {x.shape[-1]}"
            )
        width = self.spec.length * self.spec.copies(self.group.size)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        centred = wide - self._sum(wide) / width
        y = centred * torch.rsqrt(self._sum(centred.square()) / width + self.eps)
        y = y if self.weight is None else y * self.weight.to(y.dtype)
        y = y if self.bias is None else y + self.bias.to(y.dtype)
        return y.to(x.dtype)

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """Over the channels of all ranks, `[.., 1]`."""
        return all_reduce(x.sum(-1, keepdim=True), self.group, consumer="split")

    def extra_repr(self) -> str:
        """The full width, and the place of the shard."""
        return f"{self.spec.length}, eps={self.eps}, rank {self.group.rank} of {self.group.size}"


def layer_norm_width(norm: nn.Module) -> int:
    """The number of channels a LayerNorm of torch or diffusers normalises.

    Raises:
        ValueError: `norm` is neither, or normalises several dims.
    """
    home, name = type(norm).__module__, type(norm).__name__
    known = (("torch.nn.modules.normalization", "LayerNorm"), ("diffusers.models.normalization", "FP32LayerNorm"))
    if not isinstance(norm, nn.LayerNorm) or (home, name) not in known:
        raise ValueError(f"'layer_norm' shards torch.nn.LayerNorm and diffusers' FP32LayerNorm, not {name} of {home}")
    if len(norm.normalized_shape) != 1:
        raise ValueError(f"'layer_norm' shards a norm over one dim, this one is over {tuple(norm.normalized_shape)}")
    return norm.normalized_shape[0]
