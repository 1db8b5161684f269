"""Ovis-Image.

FLUX.1's blocks with gated MLPs, whose attention counts its heads. A single block splits `proj_mlp` into halves of
`mlp_hidden_dim` channels, an absolute number. The modulations are 20 %.

Whole: the embedders and the final projection (under 1 %); the q and k norms, which act within a head.
"""

from ..shared import Published, double_block, single_block
from ..styles import Divide, PackedColwiseParallel

_HALVES = PackedColwiseParallel([1, 1])

PLANS = {
    "OvisImageTransformer2DModel": {
        "transformer_blocks.*.attn": Divide("heads"),
        "single_transformer_blocks.*": Divide("mlp_hidden_dim"),
        "single_transformer_blocks.*.attn": Divide("heads"),
        **double_block("transformer_blocks.*", _HALVES),
        **single_block("single_transformer_blocks.*", _HALVES),
    }
}

PUBLISHED: Published = {"Ovis-Image-7B": ("OvisImageTransformer2DModel", {})}
