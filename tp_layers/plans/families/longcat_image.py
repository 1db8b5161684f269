"""LongCat-Image (also Edit).

FLUX.1's blocks, whose attention counts its heads. The modulations are 27 %.

Whole: the embedders and the final projection (under 1 %); the q and k norms, which act within a head.
"""

from ..shared import Published, double_block, single_block
from ..styles import Divide

PLANS = {
    "LongCatImageTransformer2DModel": {
        "transformer_blocks.*.attn": Divide("heads"),
        "single_transformer_blocks.*.attn": Divide("heads"),
        **double_block("transformer_blocks.*"),
        **single_block("single_transformer_blocks.*"),
    }
}

PUBLISHED: Published = {
    "LongCat-Image": ("LongCatImageTransformer2DModel", {"num_layers": 10, "num_single_layers": 20}),
}
