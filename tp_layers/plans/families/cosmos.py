"""Cosmos 1.0, Predict2, Predict2.5 and Transfer2.5; and Cosmos 3, whose layers are those of a language model, twice.

Where Cosmos attends to an image too, the width of a head there is that of the output divided by the number of heads:
both are divided. The projection of the text of Predict2.5 (5 % of the 2B model) is sharded and gathered.

The second layers of Cosmos' AdaLN, of 256 inputs, are 3 % to 7 % of it. With a time for each frame they run on every
token, and where they are sharded three times the width of the states is gathered. In both the q and k norms act within
a head.
"""

from typing import Any

from torch import nn

from ..shared import Plan, Published, feed_forward, self_attention
from ..styles import Divide


def cosmos(model: nn.Module) -> Plan:
    """The plan, by whether the blocks of `model` attend to an image."""
    plan: Plan = {
        "crossattn_proj.0?": "colwise_gather",
        **{f"transformer_blocks.*.norm{index}.linear_2": "modulation" for index in (1, 2, 3)},
        "transformer_blocks.*.attn1": Divide("heads"),
        "transformer_blocks.*.attn2": Divide("heads"),
        **self_attention("transformer_blocks.*.attn1"),
        **self_attention("transformer_blocks.*.attn2"),
        **feed_forward("transformer_blocks.*.ff"),
    }
    config: Any = model.config
    if config.img_context_dim_in:
        plan["transformer_blocks.*.attn2"] = Divide("heads", "out_dim")
        plan |= {f"transformer_blocks.*.attn2.{name}_img": "colwise" for name in "qkv"}
    return plan


def _mlp(path: str) -> Plan:
    return {f"{path}.gate_proj?": "colwise", f"{path}.up_proj": "colwise", f"{path}.down_proj": "rowwise"}


_PROJECTIONS = ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj")

PLANS = {
    "CosmosTransformer3DModel": cosmos,
    "Cosmos3OmniTransformer": {
        "embed_tokens": "embedding_rowwise",
        # The checkpoint has it; the class's forward, which returns no words, does not call it.
        "lm_head": "colwise_gather",
        "layers.*.self_attn": Divide("num_attention_heads", "num_key_value_heads"),
        **{f"layers.*.self_attn.{name}": "colwise" for name in _PROJECTIONS},
        "layers.*.self_attn.to_out": "rowwise",
        "layers.*.self_attn.to_add_out": "rowwise",
        **_mlp("layers.*.mlp"),
        **_mlp("layers.*.mlp_moe_gen"),
    },
}

_14B = {"num_attention_heads": 40, "num_layers": 36}
_2B = {"num_attention_heads": 16}
_PREDICT2 = {"in_channels": 17, "extra_pos_embed_type": None}
_PREDICT25 = {**_PREDICT2, "use_crossattn_projection": True, "crossattn_proj_in_channels": 100352}

PUBLISHED: Published = {
    "Cosmos-1.0-Diffusion-7B-Text2World": ("CosmosTransformer3DModel", {}),
    "Cosmos-1.0-Diffusion-14B-Text2World": ("CosmosTransformer3DModel", _14B),
    "Cosmos-Predict2-2B-Video2World": ("CosmosTransformer3DModel", {**_PREDICT2, **_2B}),
    "Cosmos-Predict2-14B-Video2World": ("CosmosTransformer3DModel", {**_PREDICT2, **_14B}),
    "Cosmos-Predict2.5-2B": ("CosmosTransformer3DModel", {**_PREDICT25, **_2B}),
    "Cosmos-Predict2.5-14B": ("CosmosTransformer3DModel", {**_PREDICT25, **_14B}),
    "Cosmos-Transfer2.5-2B": ("CosmosTransformer3DModel", {**_PREDICT25, **_2B, "img_context_dim_in": 1152}),
    "Cosmos3-Nano": ("Cosmos3OmniTransformer", {"action_gen": True, "action_dim": 64}),
    "Cosmos3-Edge": (
        "Cosmos3OmniTransformer",
        {
            "hidden_act": "relu2",
            "hidden_size": 2048,
            "intermediate_size": 9216,
            "num_attention_heads": 16,
            "num_hidden_layers": 28,
            "vocab_size": 131072,
            "qk_norm_for_text": False,
            "use_und_k_norm_for_gen": True,
            "action_gen": True,
            "action_dim": 64,
        },
    ),
}
