"""FLUX.1 (dev, schnell, Fill, Kontext).

The AdaLN modulations (`norm1.linear`, `norm1_context.linear`, `norm.linear`) are 27 % of FLUX.1-dev.

Whole: the embedders and the final projection (under 1 %); the q and k norms, which act within a head.
"""

from ..shared import Published, feed_forward, joint_attention
from ..styles import PackedRowwiseParallel

PLANS = {
    "FluxTransformer2DModel": {
        "transformer_blocks.*.norm1.linear": "modulation",
        "transformer_blocks.*.norm1_context.linear": "modulation",
        "single_transformer_blocks.*.norm.linear": "modulation",
        **joint_attention("transformer_blocks.*.attn"),
        **feed_forward("transformer_blocks.*.ff"),
        **feed_forward("transformer_blocks.*.ff_context"),
        "single_transformer_blocks.*.attn.to_q": "colwise",
        "single_transformer_blocks.*.attn.to_k": "colwise",
        "single_transformer_blocks.*.attn.to_v": "colwise",
        "single_transformer_blocks.*.proj_mlp": "colwise",
        # Its input is the attention's output and the MLP's, one after the other.
        "single_transformer_blocks.*.proj_out": PackedRowwiseParallel(
            lambda linear: [linear.out_features, linear.in_features - linear.out_features]
        ),
    }
}

PUBLISHED: Published = {"FLUX.1-dev": ("FluxTransformer2DModel", {"guidance_embeds": True})}
