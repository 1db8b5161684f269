"""JoyImage-Edit and JoyImage-Edit-Plus.

Queries, keys and values of a stream are one Linear. The blocks share one modulation and add tables to it.

Whole: the embedders with that modulation (0.6 %) and the final projection (1 %); the q and k norms, which act within a
head.
"""

from typing import Any

from ..shared import Published, feed_forward
from ..styles import Divide, PackedColwiseParallel

_QKV = PackedColwiseParallel([1, 1, 1])
_JOYIMAGE = {
    "double_blocks.*.attn": Divide("heads"),
    "double_blocks.*.attn.img_attn_qkv": _QKV,
    "double_blocks.*.attn.img_attn_proj": "rowwise",
    "double_blocks.*.attn.txt_attn_qkv": _QKV,
    "double_blocks.*.attn.txt_attn_proj": "rowwise",
    **feed_forward("double_blocks.*.img_mlp"),
    **feed_forward("double_blocks.*.txt_mlp"),
}

PLANS = {"JoyImageEditTransformer3DModel": _JOYIMAGE, "JoyImageEditPlusTransformer3DModel": _JOYIMAGE}

_CONFIG: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32, "num_layers": 40, "theta": 10000}
PUBLISHED: Published = {
    "JoyImage-Edit": ("JoyImageEditTransformer3DModel", _CONFIG),
    "JoyImage-Edit-Plus": ("JoyImageEditPlusTransformer3DModel", _CONFIG),
}
