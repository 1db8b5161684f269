"""Allegro.

Whole: the timestep modulation (1.2 %), as a rank needs all of it, and the caption projection (under 1 %).
"""

from torch import nn

from ..shared import Plan, Published, feed_forward_of, self_attention
from ..styles import Divide


def allegro(model: nn.Module) -> Plan:
    """The plan, by the activation in the config of `model`."""
    return {
        "adaln_single.linear": "modulation",
        "transformer_blocks.*.attn1": Divide("heads"),
        "transformer_blocks.*.attn2": Divide("heads"),
        **self_attention("transformer_blocks.*.attn1"),
        **self_attention("transformer_blocks.*.attn2"),
        **feed_forward_of(model, "transformer_blocks.*.ff"),
    }


PLANS = {"AllegroTransformer3DModel": allegro}

PUBLISHED: Published = {"Allegro": ("AllegroTransformer3DModel", {})}
