"""The tensors of a sharded model: made without values on the device, and filled from the files of a checkpoint."""

import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..agree import Alarm
from ..plans.shard import Sharding
from .build import Places
from .index import Entry
from .parts import shard
from .progress import progress
from .read import CALL_BYTES, Job, read_shards
from .report import Meter

# The memory in use is looked at this often: a look takes 10 microseconds.
LOOK_SECONDS = 0.02


def allocate(model: nn.Module, names: Mapping[str, Any], device: torch.device) -> None:
    """Gives the stored tensors called `names` memory on `device`, once and in their final dtype; buffers move there."""
    places, state = Places(model), model.state_dict(keep_vars=True)
    made: set[int] = set()
    for name in names:
        # A tied tensor has several names.
        if id(state[name]) not in made:
            made.add(id(state[name]))
            places.put(name, torch.empty(state[name].shape, dtype=state[name].dtype, device=device))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)


def jobs_of(model: nn.Module, sharding: Sharding, entries: Mapping[str, Entry]) -> list[Job]:
    """What this rank reads into the model's own tensors, in the order of the files; a tied tensor once."""
    group, specs = sharding.group, sharding.resolved.specs
    state, seen = model.state_dict(keep_vars=True), set()
    jobs = []
    for name, entry in entries.items():
        target = state[name].detach()
        if id(state[name]) not in seen:
            seen.add(id(state[name]))
            jobs.append(Job(name, shard(entry, specs.get(name), group.rank, group.size), target))
    return jobs


def fill(jobs: list[Job], sharding: Sharding, alarm: Alarm, meter: Meter) -> int:
    """Reads all `jobs` and returns the bytes requested, with a progress bar; ends when another rank fails."""
    group = sharding.group
    look = time.monotonic()
    with progress(sum(job.part.requested(CALL_BYTES) for job in jobs), group) as done:

        def tick(count: int) -> None:
            nonlocal look
            done(count)
            alarm.check()
            if time.monotonic() >= look:
                meter.look()
                look = time.monotonic() + LOOK_SECONDS

        requested = read_shards(jobs, group.rank, tick)
    if meter.device.type == "cuda":
        # The last copies are still on their way.
        torch.cuda.synchronize(meter.device)
    return requested
