"""The collectives of tensor parallelism, each with its dual under autograd.

    function     forward      backward           used where
    all_reduce   sum          identity           partial sums whose consumer is whole (a rowwise output)
    all_reduce   sum          sum                partial sums whose consumer is split (a norm's sum of squares)
    replicate    identity     sum                a whole tensor that each rank uses for its own part (a colwise input)
    all_gather   merge        own shard          shards whose consumer is whole
    split        own shard    merge              a whole tensor of which each rank needs a shard
    once         rank 0's     identity           a whole term of a sum over ranks, such as a bias

Of shards of several lengths, an all-gather carries as many bytes as if all were as long as the longest.

Forward-mode derivatives, which the sum in place would leave one rank's, are refused, and by torch in the others, but
under torch.compile nobody sees them.
At size 1 each of them returns its argument. Only this module, `under_way.py` and `exchange.py` treat one rank
specially.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.forward_ad import unpack_dual
from torch.autograd.function import once_differentiable

from . import graphs, ways, windows
from .group import Group
from .in_order import GATHER, sum_in_order
from .link import run
from .plans.spec import ShardSpec


def refuse_tangent(x: torch.Tensor) -> None:
    """Raises NotImplementedError where `x` carries a forward-mode derivative, which a sum in place does not touch."""
    if not torch.compiler.is_compiling() and unpack_dual(x).tangent is not None:
        raise NotImplementedError(
            "forward-mode derivatives are not summed over ranks: use reverse mode, or take them of the unsharded model"
        )


def _sum(x: torch.Tensor, group: Group) -> torch.Tensor:
    if not x.is_contiguous():
        # gloo reduces the memory under a column view without an error and overwrites its neighbours.
        raise ValueError(f"cannot all-reduce a tensor of shape {tuple(x.shape)} with strides {x.stride()} in place")
    graphs.refuse_gloo(x, group.device)
    if x.numel() and group.deterministic:
        return sum_in_order(x, group)
    if x.numel():
        run(dist.all_reduce, x, group=group)
    return x


def _merge(x: torch.Tensor, group: Group, spec: ShardSpec) -> torch.Tensor:
    graphs.refuse_gloo(x, group.device)
    x = spec.pad(x, group.size)
    shards = x.new_empty((group.size, *x.shape))
    if x.numel():
        rows = shards.flatten(0, 1) if x.dim() else shards
        run(getattr(dist, GATHER), rows, x.contiguous(), group=group)
    return spec.merge([spec.trim(shard, rank, group.size) for rank, shard in enumerate(shards.unbind())])


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, consumer: str) -> torch.Tensor:
        ctx.group, ctx.consumer = group, consumer
        # `x` is given up to the call. It is often a view (of F.linear's 2-D product), which mark_dirty does not allow;
        # nor could the caller change a view made here in place.
        return _sum(x, group).detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        (grad,) = grads
        if ctx.consumer == "split":
            grad = _sum(grad.clone(memory_format=torch.contiguous_format), ctx.group)
        return grad, None, None


class _Replicate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _sum(grads[0].clone(memory_format=torch.contiguous_format), ctx.group), None


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, spec: ShardSpec) -> torch.Tensor:
        ctx.group, ctx.spec = group, spec
        return _merge(x, group, spec)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return ctx.spec.take(grads[0], ctx.group.rank, ctx.group.size), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group, spec: ShardSpec) -> torch.Tensor:
        ctx.group, ctx.spec = group, spec
        return spec.view(x, group.rank, group.size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _merge(grads[0], ctx.group, ctx.spec), None, None


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        return x.view_as(x) if group.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


def all_reduce(x: torch.Tensor, group: Group, consumer: str = "whole") -> torch.Tensor:
    """Sums the ranks' `x` in place and returns it. `consumer` ("whole" or "split") chooses the dual, see above.

    Raises:
        ValueError: `x` is not contiguous.
        NotImplementedError: it carries a forward-mode derivative.
    """
    if group.size == 1:
        return x
    if not (torch.is_grad_enabled() and x.requires_grad):
        refuse_tangent(x)
        return x if windows.WINDOWS and ways.summed(x, group) else _sum(x, group)
    return _AllReduce.apply(x, group, consumer)


def memory_for_sum(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, group: Group
) -> torch.Tensor | None:
    """An uninitialised tensor where its all-reduce is faster; None: anywhere. All ranks call it alike."""
    if not windows.WINDOWS or group.size == 1:
        return None
    return ways.empty(shape, dtype, device, group)


def summed(x: torch.Tensor, group: Group, wanted: torch.dtype | None = None) -> torch.Tensor:
    """The sum of the ranks' partial `x`, whose consumer is whole. `x` stays as it is, and may have any strides.

    It is reduced in the `wanted` dtype if that is wider than its own (see `summed_in`), and rounded once.
    """
    if group.size == 1:
        return x
    dtype = summed_in(wanted, x.dtype, group) or x.dtype
    return all_reduce(x.to(dtype, copy=True, memory_format=torch.contiguous_format), group).to(x.dtype)


def summed_in(wanted: torch.dtype | None, own: torch.dtype, group: Group) -> torch.dtype | None:
    """The dtype in which partial sums of dtype `own` leave their kernel and are reduced; None: in `own`.

    It is never narrower than `own`, and there is no other where nothing is reduced.
    """
    if wanted is None or group.size == 1:
        return None
    wide = torch.promote_types(wanted, own)
    return None if wide == own else wide


def replicate(x: torch.Tensor, group: Group) -> torch.Tensor:
    """`x` itself; its gradient is summed over the ranks.

    Raises:
        NotImplementedError: it carries a forward-mode derivative, which kernels would lose before a sum sees it.
    """
    if group.size == 1:
        return x
    if not (torch.is_grad_enabled() and x.requires_grad):
        refuse_tangent(x)
        return x
    return _Replicate.apply(x, group)


def all_gather(x: torch.Tensor, group: Group, spec: ShardSpec) -> torch.Tensor:
    """The full tensor of which every rank's `x` is the shard under `spec`."""
    return x if group.size == 1 else _AllGather.apply(x, group, spec)


def split(x: torch.Tensor, group: Group, spec: ShardSpec) -> torch.Tensor:
    """This rank's shard of a whole `x` under `spec`, a view where the spec allows one.

    Raises:
        ValueError: several ranks would hold the same part, whose gradients would have to be summed.
    """
    spec.require_disjoint(group.size)
    return x if group.size == 1 else _Split.apply(x, group, spec)


def once(x: torch.Tensor, group: Group) -> torch.Tensor:
    """A whole `x` on the group's rank 0, zeros elsewhere, for a sum over ranks; all of them get its gradient."""
    return x if group.size == 1 else _Once.apply(x, group)
