"""EasyAnimate 5.

The modulations `norm1.linear` and `norm2.linear` are 8 % of V5.1-12b.

Blocks after the first `mmdit_layers` run both streams through one attention and do not project the text's half of its
output: it would go back into the text as each rank's own heads. Models with such blocks are refused.

Whole: the embedders and the final projection (under 1 %), and the q and k norms, which act within a head.
"""

from collections.abc import Mapping
from typing import Any

from ..shared import Published, feed_forward_of, joint_attention
from ..styles import Divide


def _plan(model: Any) -> Mapping[str, Any]:
    shared = sum(block.txt_ff is None for block in model.transformer_blocks)
    if shared:
        raise ValueError(
            f"{type(model).__name__} with mmdit_layers={model.config.mmdit_layers} has no plan: the last {shared} of "
            f"its {model.config.num_layers} blocks do not project the text's half of the attention's output, of which "
            f"each rank has only its own heads; pass a plan that gathers there ('colwise_gather' for attn1.to_q, to_k "
            f"and to_v, and 'rowwise_split_input' for attn1.to_out.0)"
        )
    return {
        "transformer_blocks.*.norm1.linear": "modulation",
        "transformer_blocks.*.norm2.linear": "modulation",
        "transformer_blocks.*.attn1": Divide("heads"),
        **joint_attention("transformer_blocks.*.attn1"),
        **feed_forward_of(model, "transformer_blocks.*.ff"),
        **feed_forward_of(model, "transformer_blocks.*.txt_ff"),
    }


PLANS = {"EasyAnimateTransformer3DModel": _plan}

PUBLISHED: Published = {
    "EasyAnimateV5.1-12b-InP": (
        "EasyAnimateTransformer3DModel",
        {"in_channels": 33, "out_channels": 16, "patch_size": 2, "add_norm_text_encoder": True},
    )
}
