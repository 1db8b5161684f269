"""CogVideoX 1.0 and 1.5, and ConsisID, which adds a face to it.

The modulations `norm1.linear` and `norm2.linear` are 21 % of CogVideoX-2b and 14 % of 5b. What looks at the face in
ConsisID, and what attends to it, is sharded by heads as well.

Whole: the text projection and the embedders (under 1 %), the mappings of the face's features (under 1 %), and the q and
k norms, which act within a head.
"""

from torch import nn

from ..shared import Plan, Published, feed_forward_of, self_attention
from ..styles import Divide, PackedColwiseParallel


def cogvideox(model: nn.Module) -> Plan:
    """The plan, by the activation in the config of `model`."""
    return {
        "transformer_blocks.*.norm1.linear": "modulation",
        "transformer_blocks.*.norm2.linear": "modulation",
        "transformer_blocks.*.attn1": Divide("heads"),
        **self_attention("transformer_blocks.*.attn1"),
        **feed_forward_of(model, "transformer_blocks.*.ff"),
    }


def _perceiver(path: str) -> Plan:
    return {
        f"{path}?": Divide("heads"),
        f"{path}.to_q?": "colwise",
        f"{path}.to_kv?": PackedColwiseParallel([1, 1]),
        f"{path}.to_out?": "rowwise",
    }


def consisid(model: nn.Module) -> Plan:
    """The plan, by the activation in the config of `model`."""
    return {
        **cogvideox(model),
        **_perceiver("perceiver_cross_attention.*"),
        **_perceiver("local_facial_extractor.layers.*.0"),
        "local_facial_extractor.layers.*.1.1?": "colwise",
        "local_facial_extractor.layers.*.1.3?": "rowwise",
    }


PLANS = {"CogVideoXTransformer3DModel": cogvideox, "ConsisIDTransformer3DModel": consisid}

_5B = {"num_attention_heads": 48, "num_layers": 42, "use_rotary_positional_embeddings": True}

PUBLISHED: Published = {
    "CogVideoX-2b": ("CogVideoXTransformer3DModel", {}),
    "CogVideoX-5b": ("CogVideoXTransformer3DModel", _5B),
    "CogVideoX1.5-5B-I2V": (
        "CogVideoXTransformer3DModel",
        {**_5B, "in_channels": 32, "ofs_embed_dim": 512, "patch_size_t": 2, "patch_bias": False, "sample_frames": 81},
    ),
}
