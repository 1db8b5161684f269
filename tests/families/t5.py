"""T5 and UMT5 encoders."""

import torch

from .family import Family, Values


def t5(heads: int) -> Values:
    # Five tokens reach buckets 0, 1 and 2 of 8, and two blocks: the first one's bias is the second one's too.
    return dict(
        vocab_size=56, d_model=40, d_kv=6, d_ff=32, num_layers=2, num_heads=heads, feed_forward_proj="gated-gelu",
        relative_attention_num_buckets=8, relative_attention_max_distance=10,
    )  # fmt: skip


def eager(heads: int) -> Values:
    return t5(heads) | dict(feed_forward_proj="relu", attn_implementation="eager")


def t5_inputs() -> Values:
    return dict(
        input_ids=torch.tensor([[3, 55, 17, 28, 41, 9], [14, 30, 2, 44, 0, 0]]),
        attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), output_hidden_states=True,
    )  # fmt: skip


FAMILIES = [
    Family("T5EncoderModel", t5, t5_inputs, config_class="T5Config"),
    Family(
        "T5EncoderModel",
        eager,
        t5_inputs,
        variant="not gated, eager",
        config_class="T5Config",
    ),
    Family("UMT5EncoderModel", t5, t5_inputs, config_class="UMT5Config"),
    Family(
        "UMT5EncoderModel",
        eager,
        t5_inputs,
        variant="not gated, eager",
        config_class="UMT5Config",
    ),
]
