"""Nucleus-Image.

Its experts are 94 % of the model: in two parameters for all experts of a block, of which each rank holds its channels
of every expert. Their partial sums, and that of the expert shared by all tokens, are added once per block. The router
computes on whole tensors, so that on all ranks an expert takes the same tokens. The first blocks have one MLP in their
place.

The processor reads the heads' widths as `inner_dim // heads`, of which both are divided.

The modulations `img_mod.1` are 2 %. Whole: the text projection of each block (1 %), the embedders, the routers and the
final projection; the q and k norms, which act within a head.
"""

from ..shared import Published, self_attention
from ..styles import Divide, PackedColwiseParallel, ShardParameter

_MLP = "transformer_blocks.*.img_mlp"

PLANS = {
    "NucleusMoEImageTransformer2DModel": {
        "transformer_blocks.*.img_mod.1": "modulation",
        "transformer_blocks.*.attn": Divide("heads", "inner_dim", "inner_kv_dim"),
        **self_attention("transformer_blocks.*.attn"),
        "transformer_blocks.*.attn.add_k_proj": "colwise",
        "transformer_blocks.*.attn.add_v_proj": "colwise",
        _MLP: "all_reduce_output",
        f"{_MLP}.gate?": "replicated_with_grad_allreduce",
        f"{_MLP}.experts.gate_up_proj?": ShardParameter(2, [1, 1]),
        f"{_MLP}.experts.down_proj?": ShardParameter(1, partial=True),
        f"{_MLP}.shared_expert.net.0.proj?": PackedColwiseParallel([1, 1]),
        f"{_MLP}.shared_expert.net.2?": "rowwise_partial",
        f"{_MLP}.net.0.proj?": PackedColwiseParallel([1, 1]),
        f"{_MLP}.net.2?": "rowwise_partial",
    }
}

PUBLISHED: Published = {"Nucleus-Image": ("NucleusMoEImageTransformer2DModel", {})}
