"""AuraFlow.

The modulations `norm1.linear` and `norm1_context.linear` are 33 % of it.

Whole: the embedders, the register tokens and the final projection (under 1 %); the q and k norms, which act within a
head.
"""

from typing import Any

from ..shared import Published, joint_attention, self_attention
from ..styles import Divide


def _gated(path: str) -> dict[str, Any]:
    return {f"{path}.linear_1": "colwise", f"{path}.linear_2": "colwise", f"{path}.out_projection": "rowwise"}


PLANS = {
    "AuraFlowTransformer2DModel": {
        "joint_transformer_blocks.*.norm1.linear": "modulation",
        "joint_transformer_blocks.*.norm1_context.linear": "modulation",
        "joint_transformer_blocks.*.attn": Divide("heads"),
        **joint_attention("joint_transformer_blocks.*.attn"),
        **_gated("joint_transformer_blocks.*.ff"),
        **_gated("joint_transformer_blocks.*.ff_context"),
        "single_transformer_blocks.*.norm1.linear": "modulation",
        "single_transformer_blocks.*.attn": Divide("heads"),
        **self_attention("single_transformer_blocks.*.attn"),
        **_gated("single_transformer_blocks.*.ff"),
    }
}

PUBLISHED: Published = {"AuraFlow": ("AuraFlowTransformer2DModel", {})}
