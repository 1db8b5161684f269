"""A sum over ranks whose bits depend on nothing but what is summed.

An all-reduce adds in an order that follows from the size of the message, the number of nodes and the transport, so the
same element may be rounded otherwise in another call. Here each rank adds up its share of the elements, in rank order
and in float32 at least, rounds once and hands it to the others: as many bytes as a ring all-reduce carries.
"""

import torch
import torch.distributed as dist

from .group import Group
from .link import run

# torch 2.13 renamed it.
GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"


def sum_in_order(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Sums the ranks' contiguous `x` in place and returns it; `group` has more than one rank."""
    share = -(-x.numel() // group.size)
    mine = x.new_zeros(group.size * share)
    mine[: x.numel()] = x.view(-1)
    theirs = torch.empty_like(mine)
    run(dist.all_to_all_single, theirs, mine, group=group)
    total = _added(theirs.view(group.size, share))
    run(getattr(dist, GATHER), mine, total, group=group)
    x.view(-1).copy_(mine[: x.numel()])
    return x


def _added(parts: torch.Tensor) -> torch.Tensor:
    """The sum of the rows, the first two first."""
    wide = torch.promote_types(parts.dtype, torch.float32) if parts.is_floating_point() else parts.dtype
    total = parts[0].to(wide, copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts.dtype)
