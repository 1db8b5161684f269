"""`save`: an ordinary, full checkpoint from a sharded model, one full parameter at a time."""

import hashlib
import re
from pathlib import Path

import torch
from torch import nn

from ..agree import agreed
from ..collectives import receive, send
from ..group import Group
from ..plans.shard import Sharding
from ..plans.spec import ShardSpec
from .checked import require_one_checkpoint, require_unchanged, sharding_to_use
from .place import Writer
from .steps import Steps
from .target import check_target, config_files, stem_of
from .write import NAMES, Stored, by_width

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def save(model: nn.Module, path: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Writes the full model to `path`, as `save_pretrained` would have before it was sharded. All ranks call it.

    The group's rank 0 writes, and holds one full parameter and one shard at a time; it takes the shards of the others
    one by one. A checkpoint of the same model that is there is replaced in one step, once the new one is complete: if
    the save fails, or its processes are killed, the folder holds either of them whole. Over a checkpoint, several files
    have names with eight digits of this save in them; their index says which they are.

    Args:
        model: sharded by `apply` or `load`.
        path: a folder, made if needed, on rank 0's machine.
        max_shard_size: bytes of tensors a file holds at most, a number or as in "5GB"; a larger one has its own file.

    Raises:
        ValueError: on every rank, before anything is written: on some rank the model is not sharded by this package or
            was changed since, a dtype cannot be stored, or the size is not one; or the folder has another model.
        OSError: on every rank: on one, which is named, something could not be written, or got ready to be sent.
        RuntimeError: a rank died (torch.distributed's own error).
    """
    # torch.compile(model) is a module around the model itself.
    model = getattr(model, "_orig_mod", model)
    sharding, folder = sharding_to_use(model), Path(path)
    group = sharding.group

    def prepare() -> tuple[list[list[Stored]], dict[str, bytes]]:
        limit = parse_size(max_shard_size)
        require_unchanged(model, sharding)
        require_one_checkpoint(model)
        files = _plan_files(_stored(model, sharding), limit)
        configs = {}
        if group.rank == 0:
            configs = config_files(model)
            check_target(model, folder, configs)
        return files, configs

    files, configs = agreed(group, prepare, lambda found: _digest(found[0]))
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


def parse_size(size: int | str) -> int:
    """Bytes, from a number or a text such as "5GB", "500MB" or "2GiB".

    Raises:
        ValueError: it is neither, or not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", str(size).upper())
    number = size if isinstance(size, int) else int(float(found[1]) * UNITS[found[2]]) if found else 0
    if number < 1:
        raise ValueError(f"max_shard_size must be a number of bytes, or such as '5GB', got {size!r}")
    return number


def _stored(model: nn.Module, sharding: Sharding) -> list[Stored]:
    seen: set[int] = set()
    found = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        # Tied parameters are one tensor, and have one entry in the file.
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        if tensor.dtype not in NAMES:
            raise ValueError(f"'{name}' is {tensor.dtype}, which safetensors files cannot hold")
        spec = sharding.resolved.specs.get(name)
        shape = tuple(tensor.shape) if spec is None else spec.full_shape(tensor.shape)
        found.append(Stored(name, shape, tensor.dtype, spec))
    return found


def _plan_files(stored: list[Stored], limit: int) -> list[list[Stored]]:
    files: list[list[Stored]] = [[]]
    for item in stored:
        if files[-1] and sum(other.nbytes for other in files[-1]) + item.nbytes > limit:
            files.append([])
        files[-1].append(item)
    return [by_width(file) for file in files]


def _digest(files: list[list[Stored]]) -> str:
    return hashlib.sha256(repr(files).encode()).hexdigest()


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

    On rank 0 that is the full tensor on the CPU and room for one shard, on the others what they send.
    """
    if group.rank != 0:
        return (own.contiguous(),)
    full = torch.empty(spec.full_shape(own.shape), dtype=own.dtype, device="cpu")
    spec.put(own, full, 0, group.size)
    return full, torch.empty(own.shape, dtype=own.dtype, device=own.device)


def _gather(parts: tuple[torch.Tensor, ...], spec: ShardSpec, steps: Steps, group: Group) -> None:
    """Completes the full tensor on rank 0."""
    if group.rank != 0:
        send(parts[0], group, 0)
        return
    full, shard = parts
    for rank in range(1, group.size):
        # The other ranks send, whatever fails here.
        steps.attempt(spec.put, receive(shard, group, rank), full, rank, group.size)
