"""LTX-Video (2B, 13B).

Its q and k norms run over all heads at once, so they are normalised across ranks; its rotary table covers the full
inner width before the heads are split, so each rank takes its own channels of it.

Whole: the timestep modulation and the caption projection (under 1 %), and the patch projections.
"""

from typing import Any

from ..shared import feed_forward, self_attention
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
        **_attention("transformer_blocks.*.attn1"),
        **_attention("transformer_blocks.*.attn2"),
        **feed_forward("transformer_blocks.*.ff"),
        "rope": SliceOutput(-1),
    }
}
