"""PRX (1.2B, and 7B in pixel space).

The image's queries, keys and values are one Linear, the text's keys and values another. The modulations are 26 %.

Whole: the embedders and the final layer (1 %); the q and k norms, which act within a head.
"""

from ..shared import Published
from ..styles import Divide, PackedColwiseParallel

PLANS = {
    "PRXTransformer2DModel": {
        "blocks.*.modulation.lin": "modulation",
        "blocks.*.attention": Divide("heads"),
        "blocks.*.attention.img_qkv_proj": PackedColwiseParallel([1, 1, 1]),
        "blocks.*.attention.txt_kv_proj": PackedColwiseParallel([1, 1]),
        "blocks.*.attention.to_out.0": "rowwise",
        "blocks.*.gate_proj": "colwise",
        "blocks.*.up_proj": "colwise",
        "blocks.*.down_proj": "rowwise",
    }
}

PUBLISHED: Published = {
    "PRX-1.2B": ("PRXTransformer2DModel", {}),
    "PRXPixel-7B": (
        "PRXTransformer2DModel",
        {
            "in_channels": 3,
            "patch_size": 16,
            "context_in_dim": 2048,
            "hidden_size": 3584,
            "depth": 24,
            "axes_dim": [64, 64],
            "bottleneck_size": 768,
            "resolution_embeds": True,
        },
    ),
}
