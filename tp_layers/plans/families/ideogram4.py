"""Ideogram 4.

The projection of the text encoder's layers, one after the other (`llm_cond_proj`, 53248 -> 4608, 3 %), is gathered. The
modulations are 3 %. Its 18 heads go on 2, 3 or 6 ranks.

Whole: the timestep embedder and the rest (under 1 %); the q and k norms, which act within a head.
"""

from ..shared import Published, self_attention
from ..styles import Divide

PLANS = {
    "Ideogram4Transformer2DModel": {
        "llm_cond_proj": "colwise_gather",
        "layers.*.adaln_modulation": "modulation",
        "layers.*.attention": Divide("num_heads"),
        **self_attention("layers.*.attention"),
        "layers.*.feed_forward.w1": "colwise",
        "layers.*.feed_forward.w3": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
    }
}

PUBLISHED: Published = {"Ideogram-4": ("Ideogram4Transformer2DModel", {})}
