"""`apply`: shards a model that is in memory, in place."""

import logging
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

from .agree import agreed, fingerprint, require_equal
from .group import Group, GroupLike
from .layers.options import Options
from .plans.refuse import refuse, refuse_planned
from .plans.registry import plan_for
from .plans.resolve import Resolved, resolve
from .plans.shard import fuse_model, shard_model, watch_gradients

logger = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def apply(
    model: Model,
    plan: Mapping[str, Any] | None = None,
    *,
    group: GroupLike = None,
    check: bool = True,
    backend: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    copy: bool = True,
    uneven: bool = False,
    fuse: bool | None = None,
) -> Model:
    """Shards `model` over the ranks of `group`, in place, and returns it. All ranks call it, with equal weights.

    Args:
        model: whole, on any device; its shards stay there. Each rank ends with its share of every planned parameter
            and with the parameters the plan leaves whole; at no time with more than one parameter beside them.
        plan: module paths to styles. None: the registered plan of the model's class, else its own `_tp_plan`.
        group: a process group or 1-D device mesh. None: the default process group, or a single rank without one.
        check: False accepts a plan in which nobody takes a colwise output split; `describe` then notes it.
        backend: of the layers' kernels: "triton", "torch", or "auto"; None: TP_LAYERS_BACKEND, else "auto".
        reduce_dtype: in which partial sums leave their kernels and are reduced, such as torch.float32 for a model in
            bfloat16. None: the layer's dtype.
        copy: False moves no bytes: the linear layers keep the full weights and read this rank's part of them, for
            inference on one rank, experiments, and weights in memory that the ranks share.
        uneven: True accepts sizes that do not divide head counts and widths: ranks then hold unequal numbers of whole
            heads (10, 10, 9 and 9 of 38), the first ranks more.
        fuse: True computes blocks of diffusers in fewer passes: activations within the projections before them, one
            GEMM for projections of one input, attention and MLP outputs without a cat (see `plans/fuse.py`). What is
            left as it is, a note says. None: where that is faster (`kernels.measured.FUSED`), on CUDA.

    Raises:
        ValueError: an option or the plan does not fit (see `resolve`), the model is in a state that cannot be sharded
            (see `refuse`, `refuse_planned`), the ranks hold different models, plans or weights, or another rank raises.
            The model is as it was.
    """
    group = Group.of(group)

    def prepare() -> tuple[Resolved, Options, str]:
        options = Options(backend, reduce_dtype, copy, fuse)
        # First the model's state: a wrapped or sharded model matches no plan, and the reason is not the plan.
        refuse(model)
        resolved = resolve(model, plan_for(model) if plan is None else plan, group.size, check=check, uneven=uneven)
        refuse_planned(model, resolved)
        return resolved, options, fingerprint(model, resolved, [options.common])

    resolved, options, _ = agreed(group, prepare, lambda found: found[2])
    require_equal(dict(model.named_parameters()), group)
    shard_model(model, resolved, group, options)
    watch_gradients(model, resolved, group)
    for note in fuse_model(model, options):
        logger.warning("%s", note)
    logger.info("sharded %d parameters of %s over %d ranks", len(resolved.specs), type(model).__name__, group.size)
    return model
