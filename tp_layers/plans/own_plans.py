"""The plans that models of transformers carry: its names of styles, in ours."""

from typing import Any

from torch import nn

from .linear_styles import PackedColwiseParallel, PackedRowwiseParallel
from .match import match

TRANSLATED: dict[str, Any] = {
    "colwise": "colwise",
    "rowwise": "rowwise",
    "colwise_gather_output": "colwise_gather",
    "colwise_rep": "colwise_gather",
    "rowwise_split_input": "rowwise_split_input",
    "rowwise_rep": "rowwise_split_input",
    "packed_colwise": PackedColwiseParallel([1, 1]),
    "packed_rowwise": PackedRowwiseParallel([1, 1]),
    "embedding_rowwise": "embedding_rowwise",
    # Cut along the other dim there; what comes out is the same.
    "embedding_colwise": "embedding_rowwise",
    "replicated_with_grad_allreduce": "replicated_with_grad_allreduce",
    "replicate": "replicate",
}


def has_own_plan(model: nn.Module) -> bool:
    """Whether `model` is one of transformers, which makes each instance a plan from those of its class and config."""
    return isinstance(getattr(type(model), "tp_plan", None), property)


def own_plan(model: nn.Module) -> dict[str, Any]:
    """The plan of a model of transformers, without what it has for modules that only other configs have.

    Raises:
        ValueError: it has a style that is not carried out here.
    """
    plan: dict[str, Any] = getattr(model, "tp_plan", None) or {}
    found = {}
    for key, name in plan.items():
        if not match(model, {f"{key}?": "replicate"}):
            continue
        if name not in TRANSLATED:
            raise ValueError(
                f"transformers' own plan of {type(model).__name__} has the style '{name}' for '{key}', which is not "
                f"among those carried out here ({', '.join(TRANSLATED)}): pass plan={{...}}"
            )
        found[key] = TRANSLATED[name]
    return found
