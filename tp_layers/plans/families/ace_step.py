"""ACE-Step 1.5.

Its attention counts heads of queries and heads of keys and values separately, and both are divided. Each of the two
time embeddings ends in a modulation of all blocks (3 %).

Whole: the rest of the time embeddings, the condition embedder, the convolutions at both ends and the tables added to
the modulation (1 %); the q and k norms, which act within a head.
"""

from ..shared import Published, self_attention
from ..styles import Divide

PLANS = {
    "AceStepTransformer1DModel": {
        "time_embed.time_proj": "modulation",
        "time_embed_r.time_proj": "modulation",
        "layers.*.self_attn": Divide("heads", "kv_heads"),
        **self_attention("layers.*.self_attn"),
        "layers.*.cross_attn": Divide("heads", "kv_heads"),
        **self_attention("layers.*.cross_attn"),
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
}

PUBLISHED: Published = {"ACE-Step-1.5": ("AceStepTransformer1DModel", {})}
