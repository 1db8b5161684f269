"""LTX-Video (2B, 13B).

Its q and k norms run over all heads at once, so they are normalised across ranks; its rotary table covers the full
inner width before the heads are split, so each rank takes its own channels of it. The blocks share one modulation
(`time_embed.linear`, 1 %) and add tables to it.

Whole: the timestep and caption embedders and the patch projections (1 %).
"""

from typing import Any

from ..shared import Published, feed_forward, self_attention
from ..styles import Divide, SliceOutput


def _attention(path: str) -> dict[str, Any]:
    return {
        path: Divide("heads"),
        **self_attention(path),
        f"{path}.norm_q": "rms_norm",
        f"{path}.norm_k": "rms_norm",
    }


PLANS = {
    "LTXVideoTransformer3DModel": {
        "time_embed.linear": "modulation",
        **_attention("transformer_blocks.*.attn1"),
        **_attention("transformer_blocks.*.attn2"),
        **feed_forward("transformer_blocks.*.ff"),
        "rope": SliceOutput(-1),
    }
}

PUBLISHED: Published = {
    "LTX-Video-2B": ("LTXVideoTransformer3DModel", {}),
    "LTX-Video-13B": (
        "LTXVideoTransformer3DModel",
        {"attention_head_dim": 128, "cross_attention_dim": 4096, "num_layers": 48},
    ),
}
