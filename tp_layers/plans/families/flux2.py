"""FLUX.2 (dev, klein).

The three modulations are global: 2 % of FLUX.2-dev, 4 % of klein.

Whole: the embedders and the final projection (1 %), and the q and k norms, which act within a head. No attribute is
divided: the single blocks split their projection by the ratio of `inner_dim` to `mlp_hidden_dim`, which stays what it
was.
"""

from typing import Any

from ..shared import Published, joint_attention
from ..styles import PackedColwiseParallel, PackedRowwiseParallel


def _gated(path: str) -> dict[str, Any]:
    return {f"{path}.linear_in": PackedColwiseParallel([1, 1]), f"{path}.linear_out": "rowwise"}


PLANS = {
    "Flux2Transformer2DModel": {
        "norm_out.linear": "replicate",
        "double_stream_modulation_img.linear": "modulation",
        "double_stream_modulation_txt.linear": "modulation",
        "single_stream_modulation.linear": "modulation",
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
    "FLUX.2-klein-4B": (
        "Flux2Transformer2DModel",
        {
            "num_layers": 5,
            "num_single_layers": 20,
            "num_attention_heads": 24,
            "joint_attention_dim": 7680,
            "guidance_embeds": False,
        },
    ),
    "FLUX.2-klein-9B": (
        "Flux2Transformer2DModel",
        {
            "num_single_layers": 24,
            "num_attention_heads": 32,
            "joint_attention_dim": 12288,
            "guidance_embeds": False,
        },
    ),
}
