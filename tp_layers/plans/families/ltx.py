"""LTX-Video (2B, 13B).

Its q and k norms run over all heads at once, so they are normalised across ranks; its rotary table covers the full
inner width before the heads are split, so each rank takes its own channels of it. The blocks share one modulation
(`time_embed.linear`, 1 %) and add tables to it.

Whole: the timestep and caption embedders and the patch projections (1 %).
"""

from torch import nn

from ..shared import Plan, Published, feed_forward_of, self_attention
from ..styles import Divide, SliceOutput


def _attention(path: str) -> Plan:
    return {
        path: Divide("heads"),
        **self_attention(path),
        f"{path}.norm_q": "rms_norm",
        f"{path}.norm_k": "rms_norm",
    }


def _plan(model: nn.Module) -> Plan:
    return {
        "time_embed.linear": "modulation",
        **_attention("transformer_blocks.*.attn1"),
        **_attention("transformer_blocks.*.attn2"),
        **feed_forward_of(model, "transformer_blocks.*.ff"),
        "rope": SliceOutput(-1),
    }


PLANS = {"LTXVideoTransformer3DModel": _plan}

PUBLISHED: Published = {
    "LTX-Video-2B": ("LTXVideoTransformer3DModel", {}),
    "LTX-Video-13B": (
        "LTXVideoTransformer3DModel",
        {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
    ),
}
