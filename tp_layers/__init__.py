"""Tensor-parallel layers for diffusion models: shard a model over ranks, in memory or while its checkpoint is read."""

from . import diffusers as diffusers
from .adapters import load_adapter, set_adapters, unload_adapter
from .apply import apply
from .describe import describe
from .layers.conv import ColwiseConv, DepthwiseConv, RowwiseConv
from .layers.layer_norm import AcrossLayerNorm
from .layers.linear import ColwiseLinear, RowwiseLinear
from .layers.norm import AcrossRMSNorm
from .load import load
from .loader.reload import reload
from .loader.save import save
from .plans.registry import plan_for, register
from .plans.styles import (
    Divide,
    PackedColwiseParallel,
    PackedDepthwise,
    PackedRowwiseParallel,
    ShardParameter,
    SliceOutput,
)
from .verify import verify

__all__ = [
    "AcrossLayerNorm",
    "AcrossRMSNorm",
    "ColwiseConv",
    "ColwiseLinear",
    "DepthwiseConv",
    "Divide",
    "PackedColwiseParallel",
    "PackedDepthwise",
    "PackedRowwiseParallel",
    "RowwiseConv",
    "RowwiseLinear",
    "ShardParameter",
    "SliceOutput",
    "apply",
    "describe",
    "load",
    "load_adapter",
    "plan_for",
    "register",
    "reload",
    "save",
    "set_adapters",
    "unload_adapter",
    "verify",
]
__version__ = "0.1.0"
