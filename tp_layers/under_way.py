"""Sums over ranks that are under way while something else is computed. Nothing is differentiated through them."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from . import graphs
from .collectives import all_reduce, refuse_tangent
from .group import Group


def start_all_reduce(x: torch.Tensor, group: Group) -> Callable[[], torch.Tensor]:
    """Starts summing the ranks' contiguous `x`, in place, and returns what waits for the sum and returns it.

    Under torch.compile the sum is a tensor of its own.
    """
    if group.size == 1 or group.deterministic or not x.numel():
        done = all_reduce(x, group)
        return lambda: done
    if torch.compiler.is_compiling():
        started = torch.ops._c10d_functional.all_reduce(x, "sum", _name(group))
        return lambda: torch.ops._c10d_functional.wait_tensor(started)
    refuse_tangent(x)
    graphs.refuse_gloo(x, group.device)
    work = dist.all_reduce(x, group=group.channel, async_op=True)
    _give_way(x)
    return lambda: _waited(x, work, group)


def _waited(x: torch.Tensor, work: Any, group: Group) -> torch.Tensor:
    if group.link is None:
        work.wait()
    else:
        group.link.wait(work)
    return x


def all_reduce_later(x: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum of the ranks' contiguous `x`, in place, for which the first operation that reads it waits."""
    if group.size == 1 or group.deterministic or not x.numel() or torch.compiler.is_compiling():
        return all_reduce(x, group)
    if graphs.captures(x):
        # What reads it may lie outside the graph, which must end with nothing under way.
        return all_reduce(x, group)
    refuse_tangent(x)
    torch.ops._c10d_functional.all_reduce_(x, "sum", _name(group))
    _give_way(x)
    return AsyncCollectiveTensor(x)


def _give_way(x: torch.Tensor) -> None:
    """Lets a model's own threads (`failure.py`) move `x`, which would wait for the scheduler's next tick, 1 to 4 ms."""
    if x.device.type == "cpu" and sys.platform == "linux":
        os.sched_yield()


def _name(group: Group) -> str:
    assert group.channel is not None
    return group.channel.group_name
