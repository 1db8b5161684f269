"""`reload`: other weights of the same architecture into a model that is sharded already, in place."""

import json
import logging
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..agree import Alarm, agreed
from .architecture import difference
from .checked import mark_half_loaded, require_unchanged, sharding_to_use
from .fill import fill, jobs_of, needed_parts
from .folder import find_folder, naming, read_config
from .keys import check_keys
from .parts import Parts
from .pretrained import is_pretrained, name_model
from .rename import rename_entries
from .report import Meter
from .snapshot import contents, read_sources
from .target import CONFIG, config_files

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


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

    Each rank reads its shards into the memory the model has, cast to the dtypes the model has (through 8 MiB of buffers
    then). An optimiser, compiled code or a captured graph that holds its parameters sees the new values.

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
    sharding = sharding_to_use(inner)
    group = sharding.group
    meter = Meter(next(inner.parameters(), torch.empty(0)).device)

    def prepare() -> tuple[Parts, list[str]]:
        require_unchanged(inner, sharding)
        folder = find_folder(path, subfolder, variant, revision)
        _require_same_architecture(inner, folder)
        entries, specs = read_sources(folder, variant), sharding.resolved.specs
        with naming(folder):
            if is_pretrained(inner):
                entries = rename_entries(inner, entries)
            found = check_keys(inner, entries, check, specs, in_place=True)
            parts = needed_parts(inner, found, specs, group)
        return parts, contents(entries)

    with meter.phase("preparing"):
        parts, _ = agreed(group, prepare, lambda found: found[1])
    jobs, alarm = jobs_of(inner, parts), Alarm(group)
    try:
        with meter.phase("reading"):
            requested = agreed(group, lambda: fill(jobs, group, alarm, meter), alarm=alarm)
    except BaseException as error:
        mark_half_loaded(inner, f"{type(error).__name__}: {error}")
        raise
    mark_half_loaded(inner, None)
    name_model(inner, path)
    done = meter.report(group.rank, group.size, inner, sum(job.part.needed for job in jobs), requested)
    logger.info("%s", done)
    return (model, done) if report else model


def _require_same_architecture(model: nn.Module, folder: Path) -> None:
    """Weights of the same shapes mean something else to a model with other heads or another epsilon."""
    written = config_files(model).get(CONFIG)
    # The dtype a transformers model was loaded in last is none of its architecture.
    found = read_config(folder)
    differing = difference(model, found, json.loads(written), ("dtype", "torch_dtype")) if written else ""
    if differing:
        raise ValueError(f"the checkpoint in {folder} is of another architecture: {differing}")
