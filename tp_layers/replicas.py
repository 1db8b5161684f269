"""Refused: data parallelism over the ranks of a sharding, which takes their shards for copies of one tensor.

`DistributedDataParallel` overwrites every rank's shards with rank 0's where it is made, `fully_shard` puts the pieces
of unlike shards together; the output of either still looks sane. On another axis of the mesh both are right. Not seen:
a model that is compiled as a whole, and `fully_shard` of the model without its blocks, which has been gathered by then.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .group import Group


@dataclass(frozen=True)
class RefuseReplicas:
    """The hook before each forward of a sharded model: ValueError if ranks of its group are taken for replicas."""

    group: Group

    def __call__(self, model: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for what, ranks in _replicas(model):
            if self.group.shares(ranks):
                raise ValueError(
                    f"{what} has mixed the shards of this {type(model).__name__}, which it takes for copies on the "
                    f"ranks {ranks}: load the model anew, and give {what} another axis of the mesh"
                )


def _replicas(model: nn.Module) -> Iterator[tuple[str, list[int]]]:
    """What keeps replicas of `model`, and the ranks that have them."""
    # There is no public way to ask for it; torch.compile does so too.
    active = getattr(DistributedDataParallel, "_active_ddp_module", None)
    if active is not None and any(module is model for module in active.modules()):
        yield "DistributedDataParallel", dist.get_process_group_ranks(active.process_group)
    # Who has it has imported it, which takes half a second.
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ())
    # To go through all modules takes a millisecond, which a step without gradients may not have.
    if torch.is_grad_enabled() or isinstance(model, kind):
        parameters = [it for module in model.modules() if isinstance(module, kind) for it in module.parameters()]
        for mesh in {it.device_mesh for it in parameters if hasattr(it, "device_mesh")}:
            yield "fully_shard", mesh.mesh.flatten().tolist()


def refuse_replicas(model: nn.Module, group: Group) -> None:
    """From now on a forward of `model` raises where data parallelism goes over the ranks of its `group`."""
    if group.size > 1 and group.process_group is not None:
        model.register_forward_pre_hook(RefuseReplicas(group))
