"""AnyFlow, made of Wan's blocks: bidirectional, and causal (FAR).

The causal one writes keys and values into a cache that its caller made, for all heads in the case of its pipeline. A
rank has its own heads only, so that is an error: make a cache for `model.blocks[0].attn1.heads`, or call the pipeline
with `use_kv_cache=False`.

Whole: the timestep projection (1.1 % of the 14B models), as a rank needs all of it; the embedders (under 1 %).
"""

from ..shared import Plan, Published
from ..wan_blocks import wan_block

_ANYFLOW: Plan = {"condition_embedder.time_proj": "modulation", **wan_block("blocks.*")}

PLANS = {"AnyFlowTransformer3DModel": _ANYFLOW, "AnyFlowFARTransformer3DModel": _ANYFLOW}

_SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}

PUBLISHED: Published = {
    "AnyFlow-Wan2.1-T2V-1.3B": ("AnyFlowTransformer3DModel", _SMALL),
    "AnyFlow-Wan2.1-T2V-14B": ("AnyFlowTransformer3DModel", {}),
    "AnyFlow-FAR-Wan2.1-1.3B": ("AnyFlowFARTransformer3DModel", _SMALL),
    "AnyFlow-FAR-Wan2.1-14B": ("AnyFlowFARTransformer3DModel", {}),
}
