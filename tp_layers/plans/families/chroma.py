"""Chroma (Chroma1).

FLUX.1's blocks without modulations of their own: one network, the approximator (`distilled_guidance_layer`, 3 %),
computes those of all blocks at once. Its layers are pairs of Linears with a residual stream around them.

Whole: the approximator's first and last Linear, the embedders and the final projection (under 1 %); the q and k norms,
which act within a head.
"""

from ..shared import Published, double_block, single_block

_BLOCKS = {**double_block("transformer_blocks.*"), **single_block("single_transformer_blocks.*")}

PLANS = {
    "ChromaTransformer2DModel": {
        **{key: style for key, style in _BLOCKS.items() if style != "modulation"},
        "distilled_guidance_layer.layers.*.linear_1": "colwise",
        "distilled_guidance_layer.layers.*.linear_2": "rowwise",
    }
}

PUBLISHED: Published = {"Chroma1-HD": ("ChromaTransformer2DModel", {})}
