"""FLUX.3.

Attention and MLP of a block run side by side. Image, reference images and text have blocks of their own, then blocks
for all together. The modulations are of the kinds of tokens, not of the blocks (3 %), and of every token: sharded, they
would gather three times the activations.

`context_embedder` (1 %) is gathered. Whole: the timestep embedders, the other embedders and the output (under 1 %), and
the q and k norms, which act within a head.
"""

from ..shared import Plan, Published, self_attention
from ..styles import Divide, PackedColwiseParallel


def _block(path: str) -> Plan:
    return {
        f"{path}.attn": Divide("heads"),
        **self_attention(f"{path}.attn"),
        f"{path}.ff.linear_in": PackedColwiseParallel([1, 1]),
        f"{path}.ff.linear_out": "rowwise",
    }


PLANS = {
    "Flux3Transformer2DModel": {
        "context_embedder": "colwise_gather",
        "early_stream_modulations.*.linear": "modulation",
        "single_stream_modulations.*.linear": "modulation",
        **_block("mode_blocks.*.*"),
        **_block("txt_mode_blocks.*"),
        **_block("single_transformer_blocks.*"),
    }
}

PUBLISHED: Published = {"FLUX.3": ("Flux3Transformer2DModel", {})}
