"""`reload`: other weights of the same architecture into a model that is sharded already, in place."""

import logging
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..agree import Alarm, agreed
from .build import check_keys
from .fill import fill, jobs_of
from .folder import find_folder
from .index import read_index
from .pretrained import is_pretrained, name_model
from .read import Job
from .rename import rename_entries
from .report import Meter
from .save import _checked

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


class HalfLoaded:
    """Stands before the forward of a model of which some weights are those of another checkpoint."""

    def __init__(self, problem: str) -> None:
        self.problem = problem

    def __call__(self, *args: Any) -> None:
        raise RuntimeError(f"some of the model's weights are of another checkpoint than the others: {self.problem}")


def reload(
    model: Model,
    path: str | Path,
    *,
    subfolder: str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    check: bool = True,
    report: bool = False,
) -> Any:
    """Replaces the weights of a sharded model by those of another checkpoint, and returns the model. All ranks call it.

    Each rank reads its shards into the memory the model has, with 8 MiB of buffers beside it, cast to the dtypes the
    model has. An optimiser, compiled code or a captured graph that holds its parameters sees the new values.

    Args:
        model: sharded by `apply` or `load`.
        path, subfolder, variant, revision, check: as in `load`; a checkpoint of the same architecture.
        report: True returns `(model, LoadReport)`.

    Raises:
        ValueError: the model is not sharded by this package or was changed since, or the checkpoint does not fit, and
            nothing has been read yet; or another rank fails.
        FileNotFoundError: there is no such folder, or no safetensors weights in it.
        OSError: a file cannot be read, or ends early. If any rank fails while it reads, the model is of both
            checkpoints, and refuses to run and to be saved until it has been reloaded.
    """
    # torch.compile(model) is a module around the model itself.
    inner = getattr(model, "_orig_mod", model)
    sharding = _checked(inner)
    group = sharding.group
    meter = Meter(next(inner.parameters(), torch.empty(0)).device)

    def prepare() -> list[Job]:
        folder = find_folder(path, subfolder, variant, revision)
        _require_same_config(inner, folder)
        entries = read_index(folder, variant)
        if is_pretrained(inner):
            entries = rename_entries(inner, entries)
        return jobs_of(inner, sharding, check_keys(inner, entries, check, sharding.resolved.specs))

    with meter.phase("preparing"):
        jobs = agreed(group, prepare, lambda found: [(job.name, job.part.entry.dtype) for job in found])
    alarm = Alarm(group)
    try:
        with meter.phase("reading"):
            requested = agreed(group, lambda: fill(jobs, sharding, alarm, meter), alarm=alarm)
    except BaseException as error:
        _mark(inner, f"{type(error).__name__}: {error}")
        raise
    _mark(inner, None)
    name_model(inner, path)
    done = meter.report(group.rank, group.size, inner, sum(job.part.needed for job in jobs), requested)
    logger.info("%s", done)
    return (model, done) if report else model


def _mark(model: nn.Module, problem: str | None) -> None:
    """From now on the model refuses to run, because of `problem`; or (None) does no longer."""
    hooks = model._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if isinstance(hook, HalfLoaded)]:
        del hooks[key]
    if problem is not None:
        model.register_forward_pre_hook(HalfLoaded(problem), prepend=True)


def is_half_loaded(model: nn.Module) -> bool:
    """Whether the last `reload` of the model failed after it had begun to read."""
    return any(isinstance(hook, HalfLoaded) for hook in model._forward_pre_hooks.values())


def _require_same_config(model: nn.Module, folder: Path) -> None: ...
