"""`reload`: other weights of the same architecture into a model that is sharded already, in place."""

import json
import logging
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from ..agree import Alarm, agreed, fingerprint, require_equal
from .architecture import difference
from .checked import mark_half_loaded, require_unchanged, sharding_to_use
from .fill import fill, jobs_of, needed_parts, whole_tensors
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

    Each rank reads its shards into the memory the model has. Floating-point tensors of 16 bits and more are cast to the
    dtypes the model has (through 8 MiB of buffers), others must have them. An optimiser, compiled code or a captured
    graph that holds its parameters sees the new values.

    Args:
        model: sharded by `apply` or `load`.
        path, subfolder, variant, revision, check: as in `load`; a checkpoint of the same architecture.
        report: True returns `(model, LoadReport)`.

    Raises:
        ValueError: the model is not sharded by this package or was changed since, or the checkpoint does not fit, and
            nothing has been read yet; or another rank fails.
        FileNotFoundError: there is no such folder, or no safetensors weights in it.
        OSError: a file cannot be read, or ends early. If any rank fails while it reads, the model is of both
            checkpoints, and refuses to be called and to be saved until it has been reloaded.
    """
    # torch.compile(model) is a module around the model itself.
    inner = getattr(model, "_orig_mod", model)
    sharding = sharding_to_use(inner)
    group = sharding.group.callers
    meter = Meter()

    def prepare() -> tuple[Parts, str]:
        require_unchanged(inner, sharding)
        _require_writable(inner)
        meter.watch(next(inner.parameters(), torch.empty(0)).device, peak=report)
        folder = find_folder(path, subfolder, variant, revision)
        _require_same_architecture(inner, folder)
        entries, specs = read_sources(folder, variant), sharding.resolved.specs
        with naming(folder):
            if is_pretrained(inner):
                entries = rename_entries(inner, entries)
            parts = needed_parts(check_keys(inner, entries, check, specs, in_place=True), specs, group)
        return parts, fingerprint(inner, sharding.resolved, contents(entries))

    with meter.phase("preparing"):
        parts, _ = agreed(group, prepare, lambda found: found[1])
    jobs, alarm = jobs_of(inner, parts), Alarm(group)
    try:
        with meter.phase("reading"):
            requested = agreed(group, lambda: fill(jobs, group, alarm, meter), alarm=alarm)
        require_equal(whole_tensors(inner, sharding.resolved.specs), group)
    except BaseException as error:
        mark_half_loaded(inner, f"{type(error).__name__}: {error}")
        raise
    mark_half_loaded(inner, None)
    if is_pretrained(inner) or hasattr(inner, "register_to_config"):
        name_model(inner, path)
    done = meter.report(group.rank, group.size, inner, sum(job.part.needed for job in jobs), requested)
    logger.info("%s", done)
    return (model, done) if report else model


def _require_writable(model: nn.Module) -> None:
    """Every tensor can be read into where it is."""
    for name, tensor in model.state_dict().items():
        if not tensor.is_contiguous():
            raise ValueError(f"'{name}' is not contiguous, so no file can be read into it: load the checkpoint instead")
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError(f"'{name}' was made under torch.inference_mode(): reload under it too")


def _require_same_architecture(model: nn.Module, folder: Path) -> None:
    """Weights of the same shapes mean something else to a model with other heads or another epsilon."""
    written = config_files(model).get(CONFIG)
    if written is None:
        return
    # Which model of transformers has saved it, and in which dtype, is none of its architecture.
    notes = ("dtype", "torch_dtype", "architectures")
    differing = difference(model, read_config(folder), json.loads(written), notes)
    if differing:
        raise ValueError(f"the checkpoint in {folder} is of another architecture: {differing}")
