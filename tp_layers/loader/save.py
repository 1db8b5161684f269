"""`save`: an ordinary, full checkpoint from a sharded model, one full parameter at a time."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..collectives import broadcast_text, receive, send
from ..group import Group
from ..plans.shard import Sharding, sharding_of
from .write import NAMES, Stored, Writer

UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def save(model: nn.Module, path: str | Path, *, max_shard_size: int | str = "5GB") -> None:
    """Writes the full model to `path`, as `save_pretrained` would have before it was sharded. All ranks call it.

    The group's rank 0 writes, and holds one full parameter and one shard at a time; it takes the shards of the others
    one by one. The files get their names only once all of them are complete.

    Args:
        model: sharded by `apply` or `load`.
        path: a folder, made if needed, on rank 0's machine.
        max_shard_size: bytes of tensors a file holds at most, a number or as in "5GB"; a larger one has its own file.

    Raises:
        ValueError: the model is not sharded by this package or was changed since, a dtype cannot be stored, or the size
            is not one.
        OSError: rank 0 cannot write; raised on every rank. Until all files are complete, a checkpoint that was there
            is as it was.
    """
    # torch.compile(model) is a module around the model itself.
    model = getattr(model, "_orig_mod", model)
    sharding = _checked(model)
    limit = parse_size(max_shard_size)
    group, folder = sharding.group, Path(path)
    files = _plan_files(_stored(model, sharding), limit)
    problem = ""
    writer = Writer(model, folder, files) if group.rank == 0 else None
    state = model.state_dict()
    for number, stored in enumerate(files):
        for item in stored:
            full = _gather(state[item.name], item, group)
            if writer is not None and not problem:
                # The others are sending: after a failure their shards are taken to the end, and all ranks raise.
                problem = _attempt(folder, writer.write, number, item, full)
            # Freed before the next one is put together.
            del full
    if writer is not None:
        problem = problem or _attempt(folder, writer.finish)
        if problem:
            writer.discard()
    problem = broadcast_text(problem, group)
    if problem:
        raise OSError(problem)


def _checked(model: nn.Module) -> Sharding:
    """The model's sharding, if the model still is what it was after sharding.

    A wrapped block has other names and a replaced layer other shapes: its shard would be written as if it were whole.
    """
    sharding, what = sharding_of(model), type(model).__name__
    if sharding is None:
        inner = [path for path, module in model.named_modules() if sharding_of(module) is not None]
        hint = f"its '{inner[0]}' is: save that" if inner else "use its own save_pretrained"
        raise ValueError(f"this {what} is not sharded by tp_layers: {hint}")
    state, specs = model.state_dict(keep_vars=True), sharding.resolved.specs
    for name, spec in specs.items():
        if name not in state:
            raise ValueError(
                f"'{name}' is gone: save before wrapping or replacing modules, or wrap with model.compile()"
            )
        local = tuple(state[name].shape)
        if local[spec.dim] * sharding.group.size != spec.length:
            raise ValueError(f"'{name}' is {local}, not a shard of {spec.full_shape(local)}: it was replaced")
    for path, module in model.named_modules():
        if getattr(module, "fused_projections", False) and any(name.startswith(f"{path}.") for name in specs):
            raise ValueError(f"the projections of '{path}' were fused after sharding: unfuse them before saving")
    return sharding


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
    # Wider dtypes first, so that each tensor starts at a multiple of its element's size.
    return [sorted(file, key=lambda item: -item.dtype.itemsize) for file in files]


def _gather(own: torch.Tensor, item: Stored, group: Group) -> torch.Tensor | None:
    """The full tensor on rank 0's CPU, None on the others."""
    if item.spec is None:
        return own.cpu() if group.rank == 0 else None
    if group.rank != 0:
        send(own, group, 0)
        return None
    full = torch.empty(item.shape, dtype=item.dtype, device="cpu")
    item.spec.put(own, full, 0, group.size)
    for rank in range(1, group.size):
        item.spec.put(receive(torch.empty_like(own), group, rank), full, rank, group.size)
    return full


def _attempt(folder: Path, action: Callable[..., None], *args: Any) -> str:
    """Does it, and returns what went wrong, if anything. Whatever that is, the other ranks must hear of it."""
    try:
        action(*args)
    except Exception as error:
        return f"cannot write the checkpoint to {folder}: {error}"
    return ""
