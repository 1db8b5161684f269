"""The ranks that share one model: the only place that asks torch.distributed who is who."""

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Union

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import windows

if TYPE_CHECKING:
    from .link import Link

# What a caller may pass as `group`.
GroupLike = Union["Group", dist.ProcessGroup, DeviceMesh, None]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Group:
    """`rank` and `size` within the group, this rank's `device`, and the process group (None: a single rank).

    `deterministic`: sums over its ranks are taken in rank order (see `in_order.py`).
    `link`: a sharded model's own process group over the same ranks (see `failure.py`).
    """

    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    process_group: dist.ProcessGroup | None = None
    deterministic: bool = False
    link: "Link | None" = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, group: GroupLike = None, deterministic: bool = False) -> "Group":
        """The `Group` of a process group, of a 1-D device mesh, or (None) of the default process group.

        Without an initialised process group, None is a single rank on the current accelerator.

        Raises:
            ValueError: the mesh has more than one axis, this process is not a member, or torchrun started it as one of
                several and there is no process group yet.
        """
        if isinstance(group, Group):
            return replace(group, deterministic=True) if deterministic else group
        if group is None and not (dist.is_available() and dist.is_initialized()):
            if int(os.environ.get("WORLD_SIZE", "1")) > 1:
                # Each of these processes would take itself for the only one, and hold the whole model.
                raise ValueError("this is one of several processes: call torch.distributed.init_process_group first")
            return cls(device=_accelerator() or CPU, deterministic=deterministic)
        found = _axis(group) if isinstance(group, DeviceMesh) else dist.group.WORLD if group is None else group
        rank = -1 if found is None or found == dist.GroupMember.NON_GROUP_MEMBER else dist.get_rank(found)
        if found is None or rank < 0:
            raise ValueError("this process is not a member of the given group: shard only on the ranks that are")
        return cls(rank, dist.get_world_size(found), _device(found), found, deterministic)

    @property
    def channel(self) -> dist.ProcessGroup | None:
        """What a forward's collectives go over: the model's own process group if it has one.

        Raises:
            RuntimeError: a rank has failed.
        """
        return self.process_group if self.link is None else self.link.require()

    @property
    def callers(self) -> "Group":
        """The same ranks over the caller's process group alone, for what is no forward."""
        return replace(self, link=None)

    @property
    def common(self) -> str:
        """What all ranks must have alike."""
        # A rank without windows would not ask the others which of theirs they have.
        return f"sums in {'rank' if self.deterministic else 'any'} order, windows {windows.WINDOWS}"

    def shares(self, ranks: Iterable[int]) -> bool:
        """Whether other members of this group are among `ranks`, of the default process group, beside this one."""
        own = [] if self.process_group is None else dist.get_process_group_ranks(self.process_group)
        return len(set(own) & set(ranks)) > 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "Group":
        # A process group is a connection, which a copied model shares with its original.
        return self


def _axis(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of a 1-D mesh; None for a process outside it."""
    if mesh.ndim != 1:
        raise ValueError(
            f"tensor parallelism needs one axis of a mesh, got the {mesh.ndim} axes {mesh.mesh_dim_names}: "
            f"pass one of them, such as mesh['tp']"
        )
    return None if mesh.get_coordinate() is None else mesh.get_group()


def _accelerator() -> torch.device | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


def _device(group: dist.ProcessGroup) -> torch.device:
    """The group's own device if it was bound to one, the CPU under gloo, else the current accelerator."""
    if group.bound_device_id is not None:
        return group.bound_device_id
    if dist.get_backend(group) == "gloo":
        return CPU
    return _accelerator() or CPU
