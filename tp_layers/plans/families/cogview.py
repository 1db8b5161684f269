"""CogView3-Plus and CogView4.

The modulation `norm1.linear` is 17 % of CogView3-Plus and 11 % of CogView4.

Whole: the text projection and the embedders (under 1 %). The q and k norms act within a head, and have no weights.
"""

from ..shared import Plan, Published, feed_forward, self_attention
from ..styles import Divide

_COGVIEW: Plan = {
    "transformer_blocks.*.norm1.linear": "modulation",
    "transformer_blocks.*.attn1": Divide("heads"),
    **self_attention("transformer_blocks.*.attn1"),
    **feed_forward("transformer_blocks.*.ff"),
}

PLANS = {"CogView3PlusTransformer2DModel": _COGVIEW, "CogView4Transformer2DModel": _COGVIEW}

PUBLISHED: Published = {
    "CogView3-Plus-3B": ("CogView3PlusTransformer2DModel", {}),
    "CogView4-6B": (
        "CogView4Transformer2DModel",
        {"num_layers": 28, "num_attention_heads": 32, "attention_head_dim": 128},
    ),
}
