"""ERNIE-Image (also Turbo).

Its layers share one modulation (1 %); the sequence is the first dim of what goes through them.

Whole: the embedders and the output (1 %); the q and k norms, which act within a head.
"""

from ..shared import Published, self_attention
from ..styles import Divide

PLANS = {
    "ErnieImageTransformer2DModel": {
        "adaLN_modulation.1": "modulation",
        "layers.*.self_attention": Divide("heads"),
        **self_attention("layers.*.self_attention"),
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.linear_fc2": "rowwise",
    }
}

PUBLISHED: Published = {
    "ERNIE-Image": (
        "ErnieImageTransformer2DModel",
        {
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_layers": 36,
            "ffn_hidden_size": 12288,
            "text_in_dim": 3072,
        },
    ),
}
