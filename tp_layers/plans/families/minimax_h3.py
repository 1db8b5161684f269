"""MiniMax-H3.

The modulation `adaln_proj.linear` (2688 -> 96768, 50 times) is 39 % of its 33 B parameters.

Whole: the text projection (28 M), the timestep MLP, the input and output heads, and the q and k norms, which act
within a head.
"""

from typing import Any

from ..shared import Published, feed_forward, self_attention
from ..styles import Divide, PackedColwiseParallel


def _block(path: str) -> dict[str, Any]:
    return {
        f"{path}.attn": Divide("heads"),
        **self_attention(f"{path}.attn"),
        **feed_forward(f"{path}.ff", PackedColwiseParallel([1, 1])),
    }


PLANS = {
    "MiniMaxH3Transformer3DModel": {
        **_block("token_refiner.refiner_blocks.*"),
        **_block("transformer_blocks.*"),
        "transformer_blocks.*.adaln_proj.linear": "modulation",
    }
}

PUBLISHED: Published = {"MiniMax-H3": ("MiniMaxH3Transformer3DModel", {})}
