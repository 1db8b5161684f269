"""Lumina-Image 2.0.

Keys and values have a third of the heads (8 of 24); their number is taken from shapes, so only `heads` is divided. The
modulation `norm1.linear` is 10 %; the text's refiner has none.

Whole: the embedders and the final projection (under 1 %), and the q and k norms, which act within a head.
"""

from typing import Any

from ..shared import Published, self_attention
from ..styles import Divide


def _block(path: str) -> dict[str, Any]:
    return {
        f"{path}.attn": Divide("heads"),
        **self_attention(f"{path}.attn"),
        f"{path}.feed_forward.linear_1": "colwise",
        f"{path}.feed_forward.linear_3": "colwise",
        f"{path}.feed_forward.linear_2": "rowwise",
    }


PLANS = {
    "Lumina2Transformer2DModel": {
        "noise_refiner.*.norm1.linear": "modulation",
        **_block("noise_refiner.*"),
        **_block("context_refiner.*"),
        "layers.*.norm1.linear": "modulation",
        **_block("layers.*"),
    }
}

PUBLISHED: Published = {"Lumina-Image-2.0": ("Lumina2Transformer2DModel", {"cap_feat_dim": 2304})}
