"""Latte, whose blocks take turns in space and in time; those in time attend to no text.

Whole: the timestep modulation, as a rank needs all of it, and the caption projection.
"""

from torch import nn

from ..shared import Plan, feed_forward_of, self_attention
from ..styles import Divide


def latte(model: nn.Module) -> Plan:
    """The plan, by the activation in the config of `model`."""
    plan: Plan = {"adaln_single.linear": "modulation"}
    for path in ("transformer_blocks.*.attn1", "transformer_blocks.*.attn2", "temporal_transformer_blocks.*.attn1"):
        plan |= {path: Divide("heads"), **self_attention(path)}
    for path in ("transformer_blocks.*.ff", "temporal_transformer_blocks.*.ff"):
        plan |= feed_forward_of(model, path)
    return plan


PLANS = {"LatteTransformer3DModel": latte}
