"""A sharded model written as an ordinary checkpoint: rank 0 writes, and takes the shards of the others one by one."""

import math
from pathlib import Path

import torch
from torch import nn

from ..exchange import receive, send
from ..group import Group
from ..plans.spec import ShardSpec
from .place import Writer
from .steps import Steps
from .target import stem_of
from .write import Stored


def save_whole(
    model: nn.Module, folder: Path, files: list[list[Stored]], configs: dict[str, bytes], group: Group
) -> None:
    """Writes `files` and `configs` to `folder` on rank 0's machine. All ranks call it, and all raise if one fails.

    Rank 0 holds one full parameter and one shard at a time, the others one shard at most.

    Raises:
        OSError: a rank failed, which is named.
    """
    writer = Writer(folder, stem_of(model), files, configs) if group.rank == 0 else None
    steps = Steps(group, f"cannot write the checkpoint to {folder}")
    try:
        _write(model, files, writer, steps, group)
        steps.settle()
    except BaseException:
        if writer is not None:
            writer.discard()
        raise
    steps = Steps(group, f"the checkpoint in {folder} is complete, but older files there could not be removed")
    if writer is not None:
        steps.attempt(writer.clean)
    steps.settle()


def _write(model: nn.Module, files: list[list[Stored]], writer: Writer | None, steps: Steps, group: Group) -> None:
    """Every tensor, in the order of the files, until a rank fails; then the step that makes them the checkpoint."""
    state = model.state_dict()
    if writer is not None:
        steps.attempt(writer.start)
    for number, item in ((number, item) for number, file in enumerate(files) for item in file):
        own = state[item.name]
        if item.spec is None:
            # Nobody waits for it: if it fails, the others hear of it before the next shards.
            if writer is not None:
                steps.attempt(writer.write, number, own)
            continue
        parts = steps.attempt(_ready, own, item.spec, group)
        if steps.failed():
            return
        _gather(parts, item.spec, steps, group)
        if writer is not None:
            steps.attempt(writer.write, number, parts[0])
        # Freed before the next one is put together.
        del parts
    if not steps.failed() and writer is not None:
        steps.attempt(writer.finish)


def _ready(own: torch.Tensor, spec: ShardSpec, group: Group) -> tuple[torch.Tensor, ...]:
    """All the memory that this rank's part in `_gather` takes: what fails, fails before another rank waits for it.

    On rank 0 that is the full tensor on the CPU and room for one shard (no rank has a larger one than itself), on the
    others what they send.
    """
    if group.rank != 0:
        return (own.contiguous(),)
    full = torch.empty(spec.full_shape(own.shape), dtype=own.dtype, device="cpu")
    spec.put(own, full, 0, group.size)
    return full, torch.empty(own.numel(), dtype=own.dtype, device=own.device)


def _gather(parts: tuple[torch.Tensor, ...], spec: ShardSpec, steps: Steps, group: Group) -> None:
    """Completes the full tensor on rank 0."""
    if group.rank != 0:
        send(parts[0], group, 0)
        return
    full, room = parts
    for rank in range(1, group.size):
        shape = spec.local_shape(full.shape, rank, group.size)
        shard = receive(room[: math.prod(shape)].view(shape), group, rank)
        # The other ranks send, whatever fails here.
        steps.attempt(spec.put, shard, full, rank, group.size)
