"""Sharding a model that is in memory, in two steps: everything that can be wrong, then what cannot be undone."""

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .agree import agreed, fingerprint, require_equal
from .failure import protect
from .group import Group
from .layers.options import Options
from .plans.context import refuse_context
from .plans.finish import finish
from .plans.overlap import check_overlap
from .plans.refuse import refuse, refuse_planned
from .plans.registry import plan_for
from .plans.resolve import Resolved, resolve
from .plans.shard import shard_model
from .rates import Rates

logger = logging.getLogger(__name__)


class How(NamedTuple):
    """The keywords of `apply` that do not depend on the model."""

    check: bool = True
    backend: str | None = None
    reduce_dtype: torch.dtype | None = None
    copy: bool = True
    uneven: bool = False
    check_inputs: bool = True
    fuse: bool | None = None
    overlap: bool | int | Rates = False


class Prepared(NamedTuple):
    """What is known before a byte moves; `common` must be the same on all ranks."""

    model: nn.Module
    resolved: Resolved
    options: Options
    common: str


def prepare(model: nn.Module, plan: Mapping[str, Any] | None, group: Group, how: How) -> Prepared:
    """What sharding `model` will do. The model is only looked at.

    Raises:
        ValueError: see `apply`.
    """
    overlap = check_overlap(how.overlap)
    options = Options(how.backend, how.reduce_dtype, how.copy, how.fuse)
    # First the model's state: a wrapped or sharded model matches no plan, and the reason is not the plan.
    refuse(model)
    refuse_context(model, group)
    chosen = plan_for(model) if plan is None else plan
    resolved = resolve(model, chosen, group.size, check=how.check, uneven=how.uneven)
    refuse_planned(model, resolved)
    return Prepared(model, resolved, options, fingerprint(model, resolved, [options.common, group.common, overlap]))


def require_equal_weights(model: nn.Module, group: Group) -> None:
    """Raises ValueError, on every rank, if the ranks do not hold the same model (see `require_equal`)."""
    require_equal(values(model), group)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    """Its parameters and buffers, those that are not empty: what ranks must have alike."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: value for name, value in found.items() if value.numel()}


def carry_out(prepared: Prepared, group: Group, how: How) -> None:
    """Shards the model, as it was prepared.

    Raises:
        Exception: a rank could not, such as for want of memory, on all of them; the model is of no use any more.
    """
    model, resolved, options, _ = prepared
    group = protect(group)
    agreed(group, lambda: shard_model(model, resolved, group, options))
    finish(model, resolved, group, options, overlap=how.overlap, check_inputs=how.check_inputs)
    logger.info("sharded %d parameters of %s over %d ranks", len(resolved.specs), type(model).__name__, group.size)
