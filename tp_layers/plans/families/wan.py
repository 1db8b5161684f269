"""Wan 2.1 and 2.2 (text, image and video to video), VACE, Animate, Animate 2, and ChronoEdit.

Their q and k norms run over all heads at once, so they are normalised across ranks. The rotary tables are the same for
all heads. VACE's `proj_in` and `proj_out` (1.4 % of its 14B model) are sharded and gathered: they are added to whole
states.

Whole: the timestep projection (1.1 % of the 14B models), as a rank needs all of it; the embedders (under 1 %); and the
encoders of motion and face of Animate (under 1 %).
"""

from ..shared import Plan, Published, projections
from ..styles import Divide
from ..wan_blocks import attention, image_keys, wan_block

_WAN: Plan = {
    "condition_embedder.time_proj": "modulation",
    **wan_block("blocks.*"),
    **image_keys("blocks.*.attn2"),
}

PLANS = {
    "WanTransformer3DModel": _WAN,
    "ChronoEditTransformer3DModel": _WAN,
    "WanVACETransformer3DModel": {
        **_WAN,
        **wan_block("vace_blocks.*"),
        **image_keys("vace_blocks.*.attn2"),
        "vace_blocks.*.proj_in": "colwise_gather",
        "vace_blocks.*.proj_out": "colwise_gather",
    },
    "WanAnimateTransformer3DModel": {
        **_WAN,
        # Its q and k norms act within a head.
        "face_adapter.*": Divide("heads"),
        **projections("face_adapter.*"),
        "face_adapter.*.to_out": "rowwise",
    },
    # A cache of keys and values holds what each rank made: its own heads.
    "WanAnimate2Transformer3DModel": {
        "time_projection.1": "modulation",
        **attention("blocks.*.self_attn"),
        **attention("blocks.*.cross_attn"),
        **image_keys("blocks.*.cross_attn"),
        "blocks.*.ffn.0": "colwise",
        "blocks.*.ffn.2": "rowwise",
    },
}

_SMALL = {"num_attention_heads": 12, "ffn_dim": 8960, "num_layers": 30}
_IMAGE = {"in_channels": 36, "image_dim": 1280, "added_kv_proj_dim": 5120}

PUBLISHED: Published = {
    "Wan2.1-T2V-1.3B": ("WanTransformer3DModel", _SMALL),
    "Wan2.1-T2V-14B": ("WanTransformer3DModel", {}),
    "Wan2.1-I2V-14B": ("WanTransformer3DModel", _IMAGE),
    "Wan2.2-T2V-A14B": ("WanTransformer3DModel", {}),
    "Wan2.2-TI2V-5B": (
        "WanTransformer3DModel",
        {"in_channels": 48, "out_channels": 48, "num_attention_heads": 24, "ffn_dim": 14336, "num_layers": 30},
    ),
    "Wan2.1-VACE-1.3B": ("WanVACETransformer3DModel", {**_SMALL, "vace_layers": list(range(0, 30, 2))}),
    "Wan2.1-VACE-14B": ("WanVACETransformer3DModel", {}),
    "Wan2.2-Animate-14B": ("WanAnimateTransformer3DModel", {"added_kv_proj_dim": 5120}),
    "Wan-Animate-2": ("WanAnimate2Transformer3DModel", {}),
}
