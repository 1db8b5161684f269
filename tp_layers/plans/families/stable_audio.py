"""Stable Audio Open and Stable Audio 3.

In Open the cross-attention has half as many heads for keys and values (12 of 24); their number is taken from shapes, so
only `heads` is divided.

In 3 attention is the difference of two, projected at once: q1, q2, k1, k2, v (q, k, v without
`use_differential_attention`). Each of them is a square, so a projection has as many blocks as it has squares. The norms
within a head call their weight `gamma`.

The one modulation of all blocks, `global_cond_embedder.2`, is 1 % of 3. Whole: the embedders and the final projection
(1 %).
"""

from typing import Any

from ..shared import Published, feed_forward, self_attention
from ..styles import Divide, PackedColwiseParallel

_SQUARES = PackedColwiseParallel(lambda linear: [1] * (linear.out_features // linear.in_features))
_HEAD_NORM = "replicated_with_grad_allreduce"


def _differential(path: str, *projections: str) -> dict[str, Any]:
    return {
        path: Divide("heads"),
        **{f"{path}.{name}": _SQUARES for name in projections},
        f"{path}.to_out": "rowwise",
        f"{path}.q_norm": _HEAD_NORM,
        f"{path}.k_norm": _HEAD_NORM,
    }


PLANS = {
    "StableAudioDiTModel": {
        "transformer_blocks.*.attn1": Divide("heads"),
        **self_attention("transformer_blocks.*.attn1"),
        "transformer_blocks.*.attn2": Divide("heads"),
        **self_attention("transformer_blocks.*.attn2"),
        **feed_forward("transformer_blocks.*.ff", PackedColwiseParallel([1, 1])),
    },
    "StableAudio3DiTModel": {
        "global_cond_embedder.2": "modulation",
        **_differential("transformer_blocks.*.self_attn", "to_qkv"),
        **_differential("transformer_blocks.*.cross_attn", "to_q", "to_kv"),
        "transformer_blocks.*.to_local_embed.0": "colwise",
        "transformer_blocks.*.to_local_embed.2": "rowwise",
        "transformer_blocks.*.ff.proj_in": PackedColwiseParallel([1, 1]),
        "transformer_blocks.*.ff.proj_out": "rowwise",
    },
}

PUBLISHED: Published = {"Stable-Audio-Open": ("StableAudioDiTModel", {})}
