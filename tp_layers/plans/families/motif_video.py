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

from ..shared import double_block, self_attention, single_block
from ..styles import Divide


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
        "transformer_blocks.*.attn": Divide("heads"),
        "single_transformer_blocks.*.attn": Divide("heads"),
        **double_block("transformer_blocks.*"),
        **single_block("single_transformer_blocks.*"),
        **{f"{key.removesuffix('?')}?": style for key, style in cross.items()},
    }


PLANS = {"MotifVideoTransformer3DModel": _plan}
