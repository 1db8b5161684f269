"""`save`: the checkpoint of a sharded model, an ordinary one or one file of shards for each rank."""

import hashlib
import logging
import re
from pathlib import Path

from torch import nn

from ..agree import agreed
from ..layers.low_rank import adapters_of
from ..plans.shard import Sharding
from .checked import require_one_checkpoint, require_unchanged, sharding_to_use
from .lock import SaveLock
from .sharded import save_shards
from .target import check_target, config_files
from .whole import save_whole
from .write import NAMES, Stored, by_width

logger = logging.getLogger(__name__)
UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def save(model: nn.Module, path: str | Path, *, max_shard_size: int | str | None = None, sharded: bool = False) -> None:
    """Writes the model to `path`. All ranks call it.

    By default that is the full model, as `save_pretrained` would have written it before it was sharded; only that
    tensors of a transformers model have the names it has in memory, not the older ones of published checkpoints that
    its `save_pretrained` goes back to. transformers reads both. Rank 0 of the group writes, and holds one full
    parameter and one shard at a time; it takes the shards of the others one by one. With `sharded=True` each rank
    writes a file of its own shards, and nothing is sent: `load` takes them as they are at the same size, and cuts them
    anew at another.

    A checkpoint of the same model that is there is replaced in one step, once the new one is complete: if the save
    fails, or its processes are killed, the folder holds either of them whole. Over an ordinary checkpoint, several
    files have eight digits of this save in their names; the index says which they are.

    Adapters that were loaded beside the weights (`load_adapter`) are not saved; a warning says so.

    Args:
        model: sharded by `apply` or `load`.
        path: a folder, made if needed: on rank 0's machine, or with `sharded=True` one that all ranks share.
        max_shard_size: bytes of tensors a file holds at most, a number or as in "5GB" (the default); a larger tensor
            has a file to itself. Not for `sharded=True`.
        sharded: a snapshot for this package alone instead of an ordinary checkpoint.

    Raises:
        ValueError: on every rank, before anything is written: on some rank the model was changed since it was sharded,
            a dtype cannot be stored, or an argument does not fit; or the folder has another model, or a checkpoint of
            the other kind, or another save is writing to it, such as a replica's.
            On this rank alone: its model is not sharded by this package, so its group is not known.
        OSError: on every rank: on one, which is named, something could not be written, or got ready to be sent.
        RuntimeError: a rank died (torch.distributed's own error).
    """
    # torch.compile(model) is a module around the model itself.
    model = getattr(model, "_orig_mod", model)
    sharding, folder = sharding_to_use(model), Path(path)
    group, lock = sharding.group.callers, SaveLock(Path(path))

    def prepare() -> tuple[list[list[Stored]], dict[str, bytes]]:
        limit = check_limit(max_shard_size, sharded=sharded)
        require_unchanged(model, sharding)
        require_one_checkpoint(model)
        stored, configs = _stored(model, sharding), {}
        files = [stored] if sharded else _plan_files(stored, limit)
        if group.rank == 0:
            lock.take()
            configs = config_files(model)
            check_target(model, folder, configs, sharded=sharded)
        return files, configs

    if adapters := list(adapters_of(model)):
        logger.warning("saving the model without its adapters %s, which are no part of its weights", adapters)
    with lock:
        files, configs = agreed(group, prepare, lambda found: _digest(sharded, found[0]))
        if sharded:
            save_shards(model, folder, files[0], configs, group)
        else:
            save_whole(model, folder, files, configs, group)


def check_limit(max_shard_size: int | str | None, *, sharded: bool) -> int:
    """Bytes of tensors that a file may hold.

    Raises:
        ValueError: it is none, or given for a snapshot.
    """
    if sharded and max_shard_size is not None:
        raise ValueError("max_shard_size is for ordinary checkpoints: sharded=True writes one file for each rank")
    return parse_size("5GB" if max_shard_size is None else max_shard_size)


def parse_size(size: int | str) -> int:
    """Bytes, from a number or a text such as "5GB", "500MB" or "2GiB".

    Raises:
        ValueError: it is neither, or not positive.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]I?B)\s*", str(size).upper())
    # True is an int too.
    number = size if type(size) is int else int(float(found[1]) * UNITS[found[2]]) if found else 0
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
    held = 0
    for item in stored:
        size = item.nbytes
        if files[-1] and held + size > limit:
            files.append([])
            held = 0
        files[-1].append(item)
        held += size
    return [by_width(file) for file in files]


def _digest(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
