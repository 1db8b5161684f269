"""The tensors of a sharded model: made without values on the device, and filled from the files of a checkpoint."""

import time
from collections.abc import Mapping

import torch
from torch import nn

from ..agree import Alarm
from ..group import Group
from ..plans.spec import ShardSpec
from .build import Places
from .mapped import map_parts
from .parts import Parts, parts_of
from .progress import progress
from .read import CALL_BYTES, Job, read_shards
from .report import Meter
from .snapshot import Source

# The memory in use is looked at this often: a look takes 10 microseconds.
LOOK_SECONDS = 0.02


def allocate(model: nn.Module, parts: Parts, device: torch.device, mmap: bool) -> Parts:
    """Makes the tensors of all `parts` on `device`, once and in their final dtype, and moves the other buffers there.

    Returns the parts to be read into them. With `mmap`, those that can be mapped are not among them.
    """
    places, state = Places(model), model.state_dict(keep_vars=True)
    mapped, parts = map_parts(model, parts) if mmap else ({}, parts)
    for name, tensor in mapped.items():
        places.put(name, tensor)
    for name in dict.fromkeys(name for name, _ in parts):
        places.put(name, torch.empty(state[name].shape, dtype=state[name].dtype, device=device))
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return parts


def needed_parts(sources: Mapping[str, Source], specs: Mapping[str, ShardSpec], group: Group) -> Parts:
    """What this rank reads of the checkpoint, by the name of the tensor, in the order of the files.

    Raises:
        ValueError: a tensor of a snapshot cannot be cut in the way its spec says.
    """
    found: Parts = []
    for name, source in sources.items():
        try:
            found += [(name, part) for part in parts_of(source, specs.get(name), group.rank, group.size)]
        except ValueError as error:
            raise ValueError(f"'{name}' cannot be read: {error}") from error
    return sorted(found, key=lambda it: (str(it[1].entry.file), it[1].entry.offset))


def jobs_of(model: nn.Module, parts: Parts) -> list[Job]:
    """The parts, with the model's own tensors to read them into."""
    state = model.state_dict()
    return [Job(name, part, state[name]) for name, part in parts]


def whole_tensors(model: nn.Module, specs: Mapping[str, ShardSpec]) -> dict[str, torch.Tensor]:
    """What every rank has read whole, in which a checkpoint that is another on some rank shows."""
    return {name: it for name, it in model.state_dict().items() if name not in specs and it.numel()}


def fill(jobs: list[Job], group: Group, alarm: Alarm, meter: Meter) -> int:
    """Reads all `jobs` and returns the bytes requested, with a progress bar; ends when another rank fails."""
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
