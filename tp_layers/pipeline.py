"""`apply` for a whole pipeline: all of its components are looked at before the first one is sharded."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from .agree import agreed, require_equal
from .group import Group
from .in_memory import How, Prepared, carry_out, prepare, values
from .layers.options import Options
from .loader.components import PipelineReport, check_names, modules_of, must_fit, report_of, settle, why_whole
from .plans.overlap import check_overlap
from .plans.refuse import OFFLOAD_HINT
from .plans.shard import sharding_of

logger = logging.getLogger(__name__)


class _Found(NamedTuple):
    """What is to be done, by the names of components, and why the others stay whole."""

    prepared: dict[str, Prepared]
    reasons: dict[str, str]


def apply_pipeline(
    pipeline: Any,
    plan: Mapping[str, Any] | None,
    components: Sequence[str] | None,
    group: Group,
    how: How,
) -> PipelineReport:
    """Shards the components of `pipeline` in place and moves all of them to the group's device; see `apply`."""

    def look() -> _Found:
        Options(how.backend, how.reduce_dtype, how.copy, how.fuse)
        check_overlap(how.overlap)
        models = modules_of(pipeline)
        check_names(models, components, plan)
        for name, model in models.items():
            if hasattr(model, "_hf_hook"):
                raise ValueError(f"accelerate offloads '{name}'; remove its hooks first, {OFFLOAD_HINT}")
        return _look(models, plan or {}, components, group, how)

    def facts(found: _Found) -> Any:
        return found.reasons, {name: item.common for name, item in found.prepared.items()}

    prepared, reasons = agreed(group, look, facts)
    models = modules_of(pipeline)
    ours = {name: model for name, model in models.items() if sharding_of(model) is None}
    require_equal({f"{name}.{key}": value for name, m in ours.items() for key, value in values(m).items()}, group)
    for item in prepared.values():
        carry_out(item, group, how)
    agreed(group, lambda: settle(pipeline, group.device))
    report = report_of(pipeline, group, reasons)
    logger.info("%s", report)
    return report


def _look(
    models: Mapping[str, nn.Module],
    plans: Mapping[str, Any],
    components: Sequence[str] | None,
    group: Group,
    how: How,
) -> _Found:
    found = _Found({}, {})
    for name, model in models.items():
        sharding = sharding_of(model)
        if sharding is not None:
            if (sharding.group.size, sharding.group.process_group) != (group.size, group.process_group):
                raise ValueError(f"'{name}' is sharded over another group of ranks already")
            continue
        if components is not None and name not in components:
            found.reasons[name] = "not among components="
            continue
        named = components is not None or plans.get(name) is not None
        try:
            found.prepared[name] = prepare(model, plans.get(name), group, how)
        except ValueError as error:
            if named or must_fit(type(model)):
                raise ValueError(f"component '{name}': {error}") from error
            found.reasons[name] = why_whole(name, model, error)
    return found
