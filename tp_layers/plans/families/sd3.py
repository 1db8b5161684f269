"""Stable Diffusion 3 and 3.5 (medium, large).

The modulations `norm1.linear` and `norm1_context.linear` are 33 % of SD3-medium and of SD3.5-large, 34 % of
SD3.5-medium. Medium of 3.5 has a second self-attention `attn2` in its first 13 blocks; the last block has no way back
into the text (`to_add_out`, `ff_context`).

Whole: the table of positions, a buffer (9 % of SD3.5-medium, 3 % of SD3-medium); the embedders and the final projection
(1 %); the q and k norms of 3.5, which act within a head. Without those norms a head count that is not divided goes
unnoticed: the processor takes the head's width as `width // heads`.
"""

from ..shared import Published, feed_forward, joint_attention, self_attention
from ..styles import Divide

PLANS = {
    "SD3Transformer2DModel": {
        "transformer_blocks.*.norm1.linear": "modulation",
        "transformer_blocks.*.norm1_context.linear": "modulation",
        "transformer_blocks.*.attn": Divide("heads"),
        **joint_attention("transformer_blocks.*.attn"),
        "transformer_blocks.*.attn2?": Divide("heads"),
        **{f"{key.removesuffix('?')}?": style for key, style in self_attention("transformer_blocks.*.attn2").items()},
        **feed_forward("transformer_blocks.*.ff"),
        **feed_forward("transformer_blocks.*.ff_context"),
    }
}


def _published(heads: int, max_size: int, **different: object) -> tuple[str, dict[str, object]]:
    # As many blocks as heads.
    sizes = {"num_layers": heads, "num_attention_heads": heads, "caption_projection_dim": heads * 64}
    return "SD3Transformer2DModel", {**sizes, "pos_embed_max_size": max_size, **different}


PUBLISHED: Published = {
    "SD3-medium": _published(24, 192),
    "SD3.5-medium": _published(24, 384, qk_norm="rms_norm", dual_attention_layers=tuple(range(13))),
    "SD3.5-large": _published(38, 192, qk_norm="rms_norm"),
}
