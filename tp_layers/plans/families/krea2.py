"""Krea 2.

Fewer heads of keys and values than of queries, and a sigmoid gate on the attention's output, from a projection of its
own. A small transformer first mixes the layers of the text encoder, then its tokens. The blocks share one modulation
(`time_mod_proj`, 2 %) and add tables to it.

Whole: the embedders and the final layer (under 1 %); the q and k norms, which act within a head.
"""

from collections.abc import Sequence
from typing import Any

from torch import nn

from ..shared import Plan, Published, self_attention
from ..styles import Divide


def _block(path: str, qkv: Sequence[int]) -> Plan:
    return {
        f"{path}.attn": Divide("num_heads", "num_kv_heads"),
        **self_attention(f"{path}.attn", qkv),
        f"{path}.attn.to_gate": "colwise",
        f"{path}.ff.gate": "colwise",
        f"{path}.ff.up": "colwise",
        f"{path}.ff.down": "rowwise",
    }


def _krea2(model: nn.Module) -> Plan:
    config: Any = model.config
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    text_heads, text_kv_heads = config.text_num_attention_heads, config.text_num_key_value_heads
    text = (text_heads, text_kv_heads, text_kv_heads)
    return {
        "time_mod_proj": "modulation",
        **_block("text_fusion.layerwise_blocks.*", text),
        **_block("text_fusion.refiner_blocks.*", text),
        **_block("transformer_blocks.*", (heads, kv_heads, kv_heads)),
    }


PLANS = {"Krea2Transformer2DModel": _krea2}

PUBLISHED: Published = {"Krea-2": ("Krea2Transformer2DModel", {})}
