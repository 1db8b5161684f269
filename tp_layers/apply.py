"""`apply`: shards a model, or the models of a pipeline, that are in memory, in place."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, overload

import torch
from torch import nn

from .agree import agreed
from .group import Group, GroupLike
from .in_memory import How, carry_out, prepare, require_equal_weights
from .loader.components import PipelineReport, is_pipeline
from .pipeline import apply_pipeline
from .rates import Rates

Model = TypeVar("Model", bound=nn.Module)


# The keywords stand below, once.
@overload
def apply(model: Model, plan: Mapping[str, Any] | None = None, **how: Any) -> Model: ...
@overload
def apply(model: Any, plan: Mapping[str, Any] | None = None, **how: Any) -> PipelineReport: ...


def apply(  # type: ignore[misc]
    model: Any,
    plan: Mapping[str, Any] | None = None,
    *,
    group: GroupLike = None,
    components: Sequence[str] | None = None,
    check: bool = True,
    backend: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    copy: bool = True,
    uneven: bool = False,
    check_inputs: bool = True,
    fuse: bool | None = None,
    deterministic: bool = False,
    overlap: bool | int | Rates = False,
) -> Any:
    """Shards `model` over the ranks of `group`, in place, and returns it. All ranks call it, with equal weights.

    Of a pipeline of diffusers it shards the transformers, and the text encoders that have a plan; moves every component
    to the group's device; and returns a `PipelineReport`.

    Args:
        model: whole, on any device; its shards stay there. Each rank ends with its share of every planned parameter
            and with the parameters the plan leaves whole; at no time with more than one parameter beside them. Or a
            pipeline.
        plan: module paths to styles. None: the registered plan of the model's class, else its own `_tp_plan`. Of a
            pipeline: names of components to plans; those not named have None.
        group: a process group or 1-D device mesh. None: the default process group, or a single rank without one.
        components: of a pipeline, those to shard. None: every component that has a plan; a text encoder that does not
            fit the size then stays whole, with a warning.
        check: False accepts a plan in which nobody takes a colwise output split; `describe` then notes it.
        backend: of the layers' kernels: "triton", "torch", or "auto"; None: TP_LAYERS_BACKEND, else "auto".
        reduce_dtype: in which partial sums leave their kernels and are reduced, such as torch.float32 for a model in
            bfloat16. None: the layer's dtype.
        copy: False moves no bytes: the linear layers keep the full weights and read this rank's part of them, for
            inference on one rank, experiments, and weights in memory that the ranks share.
        uneven: True accepts sizes that do not divide head counts and widths: ranks then hold unequal numbers of whole
            heads (10, 10, 9 and 9 of 38), the first ranks more.
        check_inputs: False leaves out the comparison of the ranks' inputs that is made in the first forward.
        fuse: True computes blocks of diffusers in fewer passes: activations within the projections before them, one
            GEMM for projections of one input, attention and MLP outputs without a cat (see `plans/fuse.py`). What is
            left as it is, a note says. None: where that is faster (`kernels.backend.FUSED`), on CUDA. False also leaves
            the sums of two streams apart (see `plans/streams.py`).
        deterministic: True adds partial sums up in rank order, in float32 at least, so that the same terms give the
            same bits in a message of any size and in every run.
        overlap: True measures how fast the ranks compute and communicate, and has rowwise layers reduce their output in
            chunks of columns, each while later ones are computed, where that pays. A number of chunks, or rates from
            `measure`, leave out the measurement. For inference.

    Raises:
        ValueError: an option or the plan does not fit (see `resolve`), the model is in a state that cannot be sharded
            (see `refuse`, `refuse_context`, `refuse_planned`), the ranks hold different models, plans or weights, or
            another rank raises. The model, or pipeline, is as it was.
    """
    group, how = (
        Group.of(group, deterministic),
        How(check, backend, reduce_dtype, copy, uneven, check_inputs, fuse, overlap),
    )
    if is_pipeline(model):
        return apply_pipeline(model, plan, components, group, how)
    if components is not None:
        raise ValueError(f"components= is for pipelines, this is a {type(model).__name__}")
    prepared = agreed(group, lambda: prepare(model, plan, group, how), lambda found: found.common)
    require_equal_weights(model, group)
    carry_out(prepared, group, how)
    return model
