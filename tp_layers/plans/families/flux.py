"""FLUX.1 (dev, schnell, Fill, Kontext).

The AdaLN modulations (`norm1.linear`, `norm1_context.linear`, `norm.linear`) are 27 % of FLUX.1-dev.

Whole: the embedders and the final projection (under 1 %); the q and k norms, which act within a head.
"""

from ..shared import Published, double_block, single_block

PLANS = {
    "FluxTransformer2DModel": {**double_block("transformer_blocks.*"), **single_block("single_transformer_blocks.*")},
}

PUBLISHED: Published = {
    "FLUX.1-dev": ("FluxTransformer2DModel", {"guidance_embeds": True}),
    "FLUX.1-schnell": ("FluxTransformer2DModel", {}),
}
