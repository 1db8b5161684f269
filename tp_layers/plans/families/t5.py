"""T5 and UMT5 encoders (T5-XXL of FLUX.1, SD3 and others; UMT5-XXL of Wan).

The bias of a position is learned for each head: its table [buckets, heads] is cut with the heads. T5's first block
hands its bias to all others, each block of UMT5 has its own.

The embedding table is 18 % of UMT5-XXL. The model has it twice, as `shared` and in the encoder, as one tensor.

Whole: the norms.
"""

from ..shared import Plan, Published
from ..styles import Divide, ShardParameter
from ..text import with_vocabulary


def _encoder(attention: Plan) -> Plan:
    path, mlp = "encoder.block.*.layer.0.SelfAttention", "encoder.block.*.layer.1.DenseReluDense"
    return {
        f"{path}.q": "colwise",
        f"{path}.k": "colwise",
        f"{path}.v": "colwise",
        f"{path}.o": "rowwise",
        f"{path}.relative_attention_bias.weight": ShardParameter(1),
        # Gated, or the MLP of the first T5.
        f"{mlp}.wi_0?": "colwise",
        f"{mlp}.wi_1?": "colwise",
        f"{mlp}.wi?": "colwise",
        f"{mlp}.wo": "rowwise",
        **{f"{path}{name}": style for name, style in attention.items()},
    }


_TABLES = ("shared", "encoder.embed_tokens")
PLANS = {
    "T5EncoderModel": with_vocabulary(_encoder({}), *_TABLES),
    "UMT5EncoderModel": with_vocabulary(_encoder({"": Divide("n_heads")}), *_TABLES),
}

_XXL = {"d_model": 4096, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "feed_forward_proj": "gated-gelu"}
PUBLISHED: Published = {
    "T5-XXL v1.1": ("T5EncoderModel", _XXL),
    "UMT5-XXL": ("UMT5EncoderModel", {**_XXL, "vocab_size": 256384}),
}
