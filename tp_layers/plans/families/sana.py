"""Sana (0.6B, 1.6B), SANA-1.5 (4.8B), Sana-Sprint, and SANA-Video.

Self-attention and cross-attention have head counts of their own. SANA-1.5, Sprint and Video norm q and k over all heads
at once, so across ranks. The MLP is of convolutions: into two halves, a filter for each channel, and back.

SANA-Video convolves the MLP's output along the frames, all channels with all (16 % of its parameters): each rank makes
its channels of the result, which are gathered.

The modulation `time_embed.linear`, one for all blocks, is 2 %. Whole: the caption projection, the timestep MLPs and the
patch projections (1 %).
"""

from typing import Any

from ..shared import Published, self_attention
from ..styles import Divide, PackedColwiseParallel, PackedDepthwise


def _attention(path: str) -> dict[str, Any]:
    return {
        path: Divide("heads"),
        **self_attention(path),
        f"{path}.norm_q?": "rms_norm",
        f"{path}.norm_k?": "rms_norm",
    }


_PLAN = {
    "time_embed.linear": "modulation",
    **_attention("transformer_blocks.*.attn1"),
    **_attention("transformer_blocks.*.attn2"),
    "transformer_blocks.*.ff.conv_inverted": PackedColwiseParallel([1, 1]),
    "transformer_blocks.*.ff.conv_depth": PackedDepthwise([1, 1]),
    "transformer_blocks.*.ff.conv_point": "rowwise",
}
PLANS = {
    "SanaTransformer2DModel": _PLAN,
    "SanaVideoTransformer3DModel": {**_PLAN, "transformer_blocks.*.ff.conv_temp": "colwise_gather"},
}

_ACROSS = {"qk_norm": "rms_norm_across_heads"}
PUBLISHED: Published = {
    "Sana-1.6B": ("SanaTransformer2DModel", {}),
    "Sana-0.6B": (
        "SanaTransformer2DModel",
        {
            "num_attention_heads": 36,
            "num_cross_attention_heads": 16,
            "cross_attention_head_dim": 72,
            "cross_attention_dim": 1152,
            "num_layers": 28,
        },
    ),
    "SANA1.5-4.8B": ("SanaTransformer2DModel", {"num_layers": 60, **_ACROSS}),
    "Sana-Sprint-1.6B": ("SanaTransformer2DModel", {"guidance_embeds": True, **_ACROSS}),
    "SANA-Video-2B": ("SanaVideoTransformer3DModel", {"mlp_ratio": 3.0}),
}
