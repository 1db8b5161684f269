"""Hunyuan-DiT.

The second half of the blocks takes a skip connection from the first through `skip_linear` (2 x 1408 -> 1408, 19 times,
5 % of v1.2); its input and output are whole. The modulation `norm1.linear` is another 5 %.

Whole: the pooler of the text (1 %), whose weights are read past their modules; the time embedding and the final
projection (under 1 %); the q and k norms, which act within a head.
"""

from collections.abc import Mapping
from typing import Any

from ..shared import Published, feed_forward_of, self_attention
from ..styles import Divide


def _plan(model: Any) -> Mapping[str, Any]:
    return {
        "text_embedder.linear_1": "colwise",
        "text_embedder.linear_2": "rowwise",
        "time_extra_emb.extra_embedder.linear_1": "colwise",
        "time_extra_emb.extra_embedder.linear_2": "rowwise",
        "time_extra_emb.pooler": "replicate",
        "blocks.*.norm1.linear": "modulation",
        "blocks.*.skip_linear": "colwise_gather",
        "blocks.*.attn1": Divide("heads"),
        **self_attention("blocks.*.attn1"),
        "blocks.*.attn2": Divide("heads"),
        **self_attention("blocks.*.attn2"),
        **feed_forward_of(model, "blocks.*.ff"),
    }


PLANS = {"HunyuanDiT2DModel": _plan}

PUBLISHED: Published = {
    "HunyuanDiT-v1.2": (
        "HunyuanDiT2DModel",
        {
            "in_channels": 4,
            "patch_size": 2,
            "sample_size": 128,
            "hidden_size": 1408,
            "num_layers": 40,
            "mlp_ratio": 4.3637,
            "use_style_cond_and_image_meta_size": False,
        },
    )
}
