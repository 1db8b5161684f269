"""OmniGen.

Its attention counts its heads, and reshapes to `out_dim` channels. The head's width comes from the queries, the number
of kv heads from that and the keys, so neither is divided.

Whole: the token embedding (3 %), of which a token needs one row, the timestep embedders and the output (1 %), and the
two patch projections.
"""

from ..shared import self_attention
from ..styles import Divide, PackedColwiseParallel

PLANS = {
    "OmniGenTransformer2DModel": {
        "embed_tokens": "replicate",
        "layers.*.self_attn": Divide("heads", "out_dim"),
        **self_attention("layers.*.self_attn"),
        "layers.*.mlp.gate_up_proj": PackedColwiseParallel([1, 1]),
        "layers.*.mlp.down_proj": "rowwise",
    }
}
