"""Qwen-Image (also Edit and Layered) and Qwen-Image 2.1.

The modulations `img_mod.1` and `txt_mod.1` are 33 % of Qwen-Image.

Whole in Qwen-Image: the embedders and the final projection (under 1 %). Whole in 2.1: its one shared modulation (1 %),
the text projection and the rest (1 %). In both the q and k norms act within a head.

No attribute is divided: both processors take the head's width as `inner_dim // heads`.
"""

from ..shared import Published, feed_forward, joint_attention, self_attention

PLANS = {
    "QwenImageTransformer2DModel": {
        "transformer_blocks.*.img_mod.1": "modulation",
        "transformer_blocks.*.txt_mod.1": "modulation",
        **joint_attention("transformer_blocks.*.attn"),
        **feed_forward("transformer_blocks.*.img_mlp"),
        **feed_forward("transformer_blocks.*.txt_mlp"),
    },
    "QwenImage21Transformer2DModel": {
        **self_attention("transformer_blocks.*.attn"),
        "transformer_blocks.*.img_mlp.proj": "colwise",
        "transformer_blocks.*.img_mlp.gate_layer": "colwise",
        "transformer_blocks.*.img_mlp.out": "rowwise",
    },
}

PUBLISHED: Published = {
    "Qwen-Image": ("QwenImageTransformer2DModel", {}),
    "Qwen-Image-2.1": ("QwenImage21Transformer2DModel", {}),
}
