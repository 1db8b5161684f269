"""SkyReels V2, made of Wan's blocks: text and image to video, and diffusion forcing.

Whole: the timestep projection and, in models that take a frame rate, its projection (1.0 % each of the 1.3B models), as
a rank needs all of both; the embedders (under 1 %).
"""

from ..shared import Published
from ..wan_blocks import image_keys, wan_block

PLANS = {
    "SkyReelsV2Transformer3DModel": {
        "condition_embedder.time_proj": "modulation",
        "fps_projection.net.2?": "modulation",
        **wan_block("blocks.*"),
        **image_keys("blocks.*.attn2"),
    }
}

_LARGE = {"num_attention_heads": 40, "ffn_dim": 13824, "num_layers": 40}

PUBLISHED: Published = {
    "SkyReels-V2-DF-1.3B-540P": (
        "SkyReelsV2Transformer3DModel",
        {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30, "inject_sample_info": True},
    ),
    "SkyReels-V2-DF-14B": ("SkyReelsV2Transformer3DModel", _LARGE),
    "SkyReels-V2-I2V-14B": (
        "SkyReelsV2Transformer3DModel",
        {**_LARGE, "in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120},
    ),
}
