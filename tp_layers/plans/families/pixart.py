"""PixArt (alpha and sigma).

Whole: the timestep modulation (1.3 %), as a rank needs all of it, and the caption projection (1 %).
"""

from torch import nn

from ..shared import Plan, Published, feed_forward_of, self_attention
from ..styles import Divide


def pixart(model: nn.Module) -> Plan:
    """The plan, by the activation in the config of `model`."""
    return {
        "adaln_single.linear": "modulation",
        "transformer_blocks.*.attn1": Divide("heads"),
        "transformer_blocks.*.attn2": Divide("heads"),
        **self_attention("transformer_blocks.*.attn1"),
        **self_attention("transformer_blocks.*.attn2"),
        **feed_forward_of(model, "transformer_blocks.*.ff"),
    }


PLANS = {"PixArtTransformer2DModel": pixart}

PUBLISHED: Published = {
    "PixArt-Sigma-XL-2-1024": (
        "PixArtTransformer2DModel",
        {"caption_channels": 4096, "interpolation_scale": 2, "use_additional_conditions": False},
    )
}
