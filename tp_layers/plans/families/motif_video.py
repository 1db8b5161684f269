"""Motif-Video.

The blocks of FLUX.1 with head counts that are divided, and cross-attention to the text beside some of them. The last
`num_decoder_layers` single blocks have none.

In a single block the attention's output goes into the cross-attention before any projection, and is added to its
output: there a split tensor meets a whole one. Such models are refused.

The modulations are 27 % of the default config. Whole: the embedders and the final projection (under 1 %), and the q and
k norms, which act within a head.
"""

from collections.abc import Mapping
from typing import Any

from ..shared import feed_forward, joint_attention, self_attention
from ..styles import Divide, PackedRowwiseParallel


def _plan(model: Any) -> Mapping[str, Any]:
    if any(block.cross_attn is not None for block in model.single_transformer_blocks):
        raise ValueError(
            f"{type(model).__name__} with enable_text_cross_attention_single has no plan: in its single blocks the "
            f"cross-attention reads the attention's output before any projection, when each rank has only its own "
            f"heads; pass a plan that gathers there ('colwise_gather' for attn.to_q, to_k, to_v and proj_mlp, and "
            f"'rowwise_split_input' for proj_out)"
        )
    cross = {"transformer_blocks.*.cross_attn": Divide("heads"), **self_attention("transformer_blocks.*.cross_attn")}
    return {
        "transformer_blocks.*.norm1.linear": "modulation",
        "transformer_blocks.*.norm1_context.linear": "modulation",
        "single_transformer_blocks.*.norm.linear": "modulation",
        "transformer_blocks.*.attn": Divide("heads"),
        **joint_attention("transformer_blocks.*.attn"),
        **{f"{key.removesuffix('?')}?": style for key, style in cross.items()},
        **feed_forward("transformer_blocks.*.ff"),
        **feed_forward("transformer_blocks.*.ff_context"),
        "single_transformer_blocks.*.attn": Divide("heads"),
        "single_transformer_blocks.*.attn.to_q": "colwise",
        "single_transformer_blocks.*.attn.to_k": "colwise",
        "single_transformer_blocks.*.attn.to_v": "colwise",
        "single_transformer_blocks.*.proj_mlp": "colwise",
        # Its input is the attention's output and the MLP's, one after the other.
        "single_transformer_blocks.*.proj_out": PackedRowwiseParallel(
            lambda linear: [linear.out_features, linear.in_features - linear.out_features]
        ),
    }


PLANS = {"MotifVideoTransformer3DModel": _plan}
