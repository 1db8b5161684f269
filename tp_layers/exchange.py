"""What ranks tell each other beside the sums of a forward: facts, objects, texts, and tensors from one to another.

At size 1 there is nobody to ask, and each rank gets back what it gave.
"""

from typing import Any

import torch
import torch.distributed as dist

from . import graphs
from .group import Group
from .link import run


def largest(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The element-wise maximum of the ranks' `x`, as a new tensor."""
    x = x.clone()
    if group.size > 1 and group.process_group is not None and x.numel():
        run(dist.all_reduce, x, dist.ReduceOp.MAX, group=group)
    return x


def send(x: torch.Tensor, group: Group, to: int) -> None:
    """Sends `x` to rank `to` of the group, which calls `receive`."""
    dist.send(x.contiguous(), group=group.process_group, group_dst=to)


def receive(x: torch.Tensor, group: Group, source: int) -> torch.Tensor:
    """Fills the contiguous `x` with what rank `source` of the group sends."""
    dist.recv(x, group=group.process_group, group_src=source)
    return x


def gather_objects(value: Any, group: Group) -> list[Any]:
    """Every rank's `value` (pickled), in rank order, on every rank.

    A group without a process group is one process's view of it, as a trial has: there is nobody to ask.
    """
    if group.size == 1 or group.process_group is None:
        return [value]
    graphs.refuse_objects("what the ranks tell each other")
    values: list[Any] = [None] * group.size
    dist.all_gather_object(values, value, group=group.process_group)
    return values


def broadcast_text(text: str, group: Group) -> str:
    """Rank 0's `text`, on every rank; the own one where there is nobody to ask."""
    if group.size == 1 or group.process_group is None:
        return text
    graphs.refuse_objects("what the ranks tell each other")
    box = [text]
    dist.broadcast_object_list(box, group=group.process_group, group_src=0, device=group.device)
    return box[0]
