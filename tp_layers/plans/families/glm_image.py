"""GLM-Image.

The modulation `norm1.linear` is 11 % of its 6.9 B parameters. A cache of keys and values holds what each rank made: its
own heads.

Whole: the embedding of the prior's tokens (1 %), for which there is no style; the projectors (under 1 %). The q and k
norms act within a head, and have no weights.
"""

from ..shared import Published, feed_forward, self_attention
from ..styles import Divide

PLANS = {
    "GlmImageTransformer2DModel": {
        "prior_token_embedding": "replicate",
        "transformer_blocks.*.norm1.linear": "modulation",
        "transformer_blocks.*.attn1": Divide("heads"),
        **self_attention("transformer_blocks.*.attn1"),
        **feed_forward("transformer_blocks.*.ff"),
    }
}

PUBLISHED: Published = {
    "GLM-Image": ("GlmImageTransformer2DModel", {"num_attention_heads": 32, "attention_head_dim": 128})
}
