"""A sharded model straight from its checkpoint; no rank ever holds, or reads, a full planned parameter."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import nn

from ..agree import Alarm, agreed, fingerprint, require_equal
from ..failure import protect
from ..group import Group, GroupLike
from ..layers.options import Options, is_wide_float
from ..plans.finish import finish
from ..plans.overlap import check_overlap
from ..plans.refuse import refuse_planned
from ..plans.registry import plan_for
from ..plans.resolve import Resolved, resolve
from ..plans.shard import shard_model
from ..rates import Rates
from .build import build, set_dtypes
from .fill import allocate, fill, jobs_of, needed_parts, whole_tensors
from .folder import QUANTISED, find_folder, naming, read_config
from .fuse_adapters import ToFuse, adapters_to_fuse, fuse_adapters
from .keys import check_keys
from .parts import Parts
from .pretrained import describe_pretrained, is_pretrained, name_model
from .report import LoadReport, Meter
from .snapshot import Source, contents, read_sources

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)

# Arguments of from_pretrained that would make each rank read or hold the whole model, with what to do instead.
REFUSED = {
    "device_map": "each rank's shards go to that rank's device; drop it",
    "quantization_config": QUANTISED,
    "low_cpu_mem_usage": "shards are read into a model without weights, which is low_cpu_mem_usage=True; drop it",
    "use_flashpack": "FlashPack files cannot be read in slices; use the safetensors weights",
    "use_safetensors": "only safetensors files can be read in slices; drop it",
}


class _Prepared(NamedTuple):
    """What is known before a tensor is made; `common` must be the same on all ranks."""

    model: nn.Module
    resolved: Resolved
    parts: Parts
    fused: ToFuse
    options: Options
    place: torch.device
    common: str


def load_model(
    model_class: type[Model],
    path: str | Path,
    *,
    plan: Mapping[str, Any] | None = None,
    group: GroupLike = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    subfolder: str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    check: bool = True,
    mmap: bool = False,
    backend: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    uneven: bool = False,
    check_inputs: bool = True,
    report: bool = True,
    adapters: Sequence[tuple[str | Path, float]] | None = None,
    fuse: bool | None = None,
    deterministic: bool = False,
    overlap: bool | int | Rates = False,
    **refused: Any,
) -> tuple[Model, LoadReport]:
    """The sharded model of a checkpoint, and what this rank did; see `tp_layers.load`.

    `report=False` leaves the peak of a CUDA device's memory out of what is told, and torch's statistics alone.
    """
    group, meter = Group.of(group, deterministic), Meter()

    def prepare() -> _Prepared:
        refuse_arguments(refused)
        if dtype is not None and not is_wide_float(dtype):
            raise ValueError(f"dtype must be a floating-point dtype such as torch.bfloat16, got {dtype!r}")
        also = [check_overlap(overlap), group.common]
        options, place = Options(backend, reduce_dtype, fuse=fuse), _place(group.device if device is None else device)
        if mmap and place.type != "cpu":
            raise ValueError(f"mmap=True maps weights into CPU memory, not onto {place}: drop it")
        meter.watch(place, peak=report)
        folder = find_folder(path, subfolder, variant, revision)
        model, sources = describe_checkpoint(model_class, folder, dtype, variant, check)
        chosen = plan_for(model) if plan is None else plan
        resolved = resolve(model, chosen, group.size, check=check, uneven=uneven)
        refuse_planned(model, resolved)
        parts = needed_parts(sources, resolved.specs, group)
        fused = adapters_to_fuse(adapters or (), model, resolved.specs, group)
        common = fingerprint(model, resolved, [options.common, *also, *contents(sources), *fused.facts])
        return _Prepared(model, resolved, parts, fused, options, place, common)

    with meter.phase("preparing"):
        model, resolved, parts, fused, options, place, _ = agreed(group, prepare, lambda found: found.common)
        linked = protect(group)
        shard_model(model, resolved, linked, options)
    with meter.phase("allocating"):
        parts = agreed(group, lambda: allocate(model, parts, place, mmap))
    jobs, alarm = jobs_of(model, parts), Alarm(group)
    with meter.phase("reading"):
        requested = agreed(group, lambda: fill(jobs, group, alarm, meter), alarm=alarm)
    if fused.layers:
        agreed(group, lambda: fuse_adapters(model, fused.layers))
    require_equal(whole_tensors(model, resolved.specs), group)
    finish(model, resolved, linked, options, overlap=overlap, check_inputs=check_inputs)
    name_model(model, path)
    done = meter.report(group.rank, group.size, model, sum(job.part.needed for job in jobs), requested)
    logger.info("%s", done)
    return cast(Model, model), done


def _place(device: torch.device | str) -> torch.device:
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {device!s} for the shards: {error}") from error


def describe_checkpoint(
    model_class: type[Model],
    folder: Path,
    dtype: torch.dtype | None = None,
    variant: str | None = None,
    check: bool = True,
) -> tuple[Model, dict[str, Source]]:
    """The model of a checkpoint on meta, each parameter in the dtype it would be loaded in, and its stored tensors."""
    config = read_config(folder)
    entries = read_sources(folder, variant)
    with naming(folder):
        if is_pretrained(model_class):
            model, entries = describe_pretrained(model_class, folder, entries, dtype)
        else:
            model = build(model_class, config, dtype)
        entries = check_keys(model, entries, check)
    set_dtypes(model, entries, dtype)
    return cast(Model, model), entries


def refuse_arguments(arguments: Mapping[str, Any]) -> None:
    """Raises for arguments of `from_pretrained` that a sharded load cannot honour, and TypeError for unknown ones."""
    for name, value in arguments.items():
        if name not in REFUSED:
            hint = ", use dtype=" if name == "torch_dtype" else ""
            raise TypeError(f"load() got an unexpected argument '{name}'{hint}")
        harmless = True if name in ("low_cpu_mem_usage", "use_safetensors") else None
        if value is not harmless and value is not None and not (name == "use_flashpack" and value is False):
            raise ValueError(f"{name}={value!r} cannot be combined with a sharded load: {REFUSED[name]}")
