"""HunyuanVideo (T2V, I2V, Framepack), HunyuanVideo 1.5 and HunyuanImage 2.1.

The modulations (`norm1.linear`, `norm1_context.linear`, `norm.linear`) are 27 % of HunyuanVideo and HunyuanImage, 33 %
of HunyuanVideo 1.5, which has no single blocks. I2V's "token_replace" blocks have the same names; they run their
modulation twice.

The text passes two refiner blocks first. They have no q and k norms, so a head count that is not divided there goes
unnoticed.

Whole: the embedders, the refiner's modulation and the final projection (under 1 %); the q and k norms, which act within
a head.
"""

from ..shared import Plan, Published, double_block, feed_forward, self_attention, single_block
from ..styles import Divide


def _double(path: str) -> Plan:
    return {f"{path}.attn": Divide("heads"), **double_block(path)}


def _refiner(path: str) -> Plan:
    return {f"{path}.attn": Divide("heads"), **self_attention(f"{path}.attn"), **feed_forward(f"{path}.ff")}


_VIDEO = {
    **_refiner("context_embedder.token_refiner.refiner_blocks.*"),
    **_double("transformer_blocks.*"),
    "single_transformer_blocks.*.attn": Divide("heads"),
    **single_block("single_transformer_blocks.*"),
}

PLANS = {
    "HunyuanVideoTransformer3DModel": _VIDEO,
    "HunyuanVideoFramepackTransformer3DModel": _VIDEO,
    "HunyuanVideo15Transformer3DModel": {
        **_refiner("context_embedder.token_refiner.refiner_blocks.*"),
        **_double("transformer_blocks.*"),
    },
    "HunyuanImageTransformer2DModel": _VIDEO,
}

PUBLISHED: Published = {
    "HunyuanVideo": ("HunyuanVideoTransformer3DModel", {}),
    "HunyuanVideo-I2V": ("HunyuanVideoTransformer3DModel", {"image_condition_type": "token_replace"}),
    "HunyuanVideo-1.5": ("HunyuanVideo15Transformer3DModel", {}),
    "HunyuanImage-2.1": ("HunyuanImageTransformer2DModel", {"text_embed_2_dim": 1472}),
}
