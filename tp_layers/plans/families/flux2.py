"""FLUX.2 (dev, klein).

Whole: the three global modulations (2 % of FLUX.2-dev), the embedders and the final projection (under 1 %), and the q
and k norms, which act within a head. No attribute is divided: the single blocks split their projection by the ratio of
`inner_dim` to `mlp_hidden_dim`, which stays what it was.
"""

from typing import Any

from ..shared import Published, joint_attention
from ..styles import PackedColwiseParallel, PackedRowwiseParallel


def _gated(path: str) -> dict[str, Any]:
    return {f"{path}.linear_in": PackedColwiseParallel([1, 1]), f"{path}.linear_out": "rowwise"}


PLANS = {
    "Flux2Transformer2DModel": {
        **joint_attention("transformer_blocks.*.attn"),
        **_gated("transformer_blocks.*.ff"),
        **_gated("transformer_blocks.*.ff_context"),
        # q, k, v, gate, up; and attention, MLP: the sizes stand on the Linears.
        "single_transformer_blocks.*.attn.to_qkv_mlp_proj": PackedColwiseParallel(),
        "single_transformer_blocks.*.attn.to_out": PackedRowwiseParallel(),
    }
}

PUBLISHED: Published = {
    "FLUX.2-dev": ("Flux2Transformer2DModel", {}),
}
