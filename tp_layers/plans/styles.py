"""The styles by the names a plan gives them."""

from typing import Any

from .around_styles import Divide, HeadParameters, Regroup, Replicate, ShardParameter, SliceOutput
from .conv_styles import Depthwise, PackedDepthwise
from .embedding_styles import EmbeddingRowwise
from .linear_styles import (
    Colwise,
    ColwiseGather,
    PackedColwiseParallel,
    PackedRowwiseParallel,
    Rowwise,
    RowwiseSplitInput,
)
from .norm_styles import LayerNorm, RMSNorm
from .partial_styles import AllReduceOutput, RowwisePartial
from .style import Style

__all__ = [
    "STYLES",
    "Divide",
    "PackedColwiseParallel",
    "PackedDepthwise",
    "PackedRowwiseParallel",
    "Regroup",
    "Replicate",
    "ShardParameter",
    "SliceOutput",
    "Style",
    "label",
    "style_of",
]

STYLES: dict[str, Style] = {
    "colwise": Colwise(),
    "rowwise": Rowwise(),
    "rowwise_split_input": RowwiseSplitInput(),
    "rowwise_partial": RowwisePartial(),
    "all_reduce_output": AllReduceOutput(),
    "colwise_gather": ColwiseGather(),
    "embedding_rowwise": EmbeddingRowwise(),
    "depthwise": Depthwise(),
    "rms_norm": RMSNorm(),
    "layer_norm": LayerNorm(),
    "replicate": Replicate(),
    "replicated_with_grad_allreduce": HeadParameters(),
}
_NAMES = {type(style): name for name, style in STYLES.items()}
_MARKERS = {"PackedColwiseParallel": PackedColwiseParallel, "PackedRowwiseParallel": PackedRowwiseParallel}


def label(style: Style) -> str:
    """How a plan would write `style`."""
    return _NAMES.get(type(style)) or repr(style)


def style_of(value: Any) -> Style:
    """The style a plan's value stands for: a name, one of our markers, or a diffusers marker as it is.

    Raises:
        ValueError: the value is none of these.
    """
    if isinstance(value, Style):
        return value
    if isinstance(value, str) and value in STYLES:
        return STYLES[value]
    marker = _MARKERS.get(type(value).__name__)
    if marker is not None and hasattr(value, "blocks"):
        return marker(value.blocks)
    raise ValueError(
        f"unknown style {value!r}; the styles are {', '.join(map(repr, STYLES))}, PackedColwiseParallel(blocks), "
        f"PackedRowwiseParallel(blocks), PackedDepthwise(blocks), Divide(names), SliceOutput(dim), ShardParameter(dim)"
    )
