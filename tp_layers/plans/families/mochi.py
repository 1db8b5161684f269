"""Mochi 1.

The modulations are 27 % of its 10 B parameters. The rotary frequencies are learned for each head: a rank has those of
its own. The text stream ends in the last block, which has no output projection and no MLP for it.

Whole: the pooler of the text (under 1 %), with heads of its own; the embedders and the final projection (under 1 %);
the q and k norms, which act within a head.
"""

from torch import nn

from ..shared import Plan, Published, feed_forward_of, joint_attention
from ..styles import Divide, ShardParameter


def mochi(model: nn.Module) -> Plan:
    """The plan, by the activation in the config of `model`."""
    return {
        "pos_frequencies": ShardParameter(1),
        "transformer_blocks.*.norm1.linear": "modulation",
        "transformer_blocks.*.norm1_context.linear": "modulation",
        "transformer_blocks.*.norm1_context.linear_1": "modulation",
        "transformer_blocks.*.attn1": Divide("heads"),
        **joint_attention("transformer_blocks.*.attn1"),
        **feed_forward_of(model, "transformer_blocks.*.ff"),
        **feed_forward_of(model, "transformer_blocks.*.ff_context"),
    }


PLANS = {"MochiTransformer3DModel": mochi}

PUBLISHED: Published = {"Mochi-1": ("MochiTransformer3DModel", {})}
