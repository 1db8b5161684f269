"""HiDream-I1 (Full, Dev, Fast) and E1.

Its MLPs on the image stream are experts of which each token takes two, beside one for all tokens: 67 % of the model.
Each rank holds its channels of every expert, and the experts' partial sums are added once per MLP. The router computes
on whole tensors, so that all ranks send a token to the same experts. A config without experts has one MLP in the same
place.

The q and k norms run over all heads at once, so they are normalised across ranks. The AdaLN modulations are 15 %. The
projections of the 49 layers of text that the blocks read (3 %) are gathered.

Whole: the embedders, the routers, and the final layer with its modulation (under 1 %).
"""

from typing import Any

from ..shared import Published
from ..styles import Divide


def _attention(path: str, stream: str = "") -> dict[str, Any]:
    return {
        **{f"{path}.to_{name}{stream}": "colwise" for name in "qkv"},
        f"{path}.to_out{stream}": "rowwise",
        f"{path}.q_rms_norm{stream}": "rms_norm",
        f"{path}.k_rms_norm{stream}": "rms_norm",
    }


def _experts(path: str) -> dict[str, Any]:
    plan: dict[str, Any] = {path: "all_reduce_output", f"{path}.gate?": "replicated_with_grad_allreduce"}
    for mlp in (path, f"{path}.shared_experts", f"{path}.experts.*"):
        plan |= {f"{mlp}.w1?": "colwise", f"{mlp}.w3?": "colwise", f"{mlp}.w2?": "rowwise_partial"}
    return plan


def _block(path: str) -> dict[str, Any]:
    return {
        f"{path}.adaLN_modulation.1": "modulation",
        f"{path}.attn1": Divide("heads"),
        **_attention(f"{path}.attn1"),
        **_experts(f"{path}.ff_i"),
    }


PLANS = {
    "HiDreamImageTransformer2DModel": {
        "caption_projection.*.linear": "colwise_gather",
        **_block("double_stream_blocks.*.block"),
        **_attention("double_stream_blocks.*.block.attn1", "_t"),
        "double_stream_blocks.*.block.ff_t.w1": "colwise",
        "double_stream_blocks.*.block.ff_t.w3": "colwise",
        "double_stream_blocks.*.block.ff_t.w2": "rowwise",
        **_block("single_stream_blocks.*.block"),
    }
}

PUBLISHED: Published = {
    "HiDream-I1": (
        "HiDreamImageTransformer2DModel",
        {
            "patch_size": 2,
            "in_channels": 16,
            "caption_channels": [4096, 4096],
            "axes_dims_rope": [64, 32, 32],
            "llama_layers": [*range(32), *[31] * 16],
        },
    ),
}
