"""Models of text and images that encode prompts: Mistral 3, Gemma 3, Qwen2.5-VL and Qwen3-VL.

The text tower is a decoder as in `decoders`. The vision tower is 8 % of Qwen2.5-VL-7B, 7 % of Qwen3-VL-8B, 4 % of
Gemma-3-12B and 2 % of Mistral-Small-3. Qwen's has q, k and v in one Linear, and Mistral's attention counts its heads.

Whole: the norms, the patch projections, and the projectors of Mistral 3 and Gemma 3 (under 1 %).
"""

from typing import Any

from ..shared import Plan, Published
from ..styles import Divide, PackedColwiseParallel
from ..text import decoder_layers, with_vocabulary


def _pixtral(path: str) -> Plan:
    return {
        f"{path}.attention": Divide("num_heads"),
        f"{path}.attention.q_proj": "colwise",
        f"{path}.attention.k_proj": "colwise",
        f"{path}.attention.v_proj": "colwise",
        f"{path}.attention.o_proj": "rowwise",
        f"{path}.feed_forward.gate_proj": "colwise",
        f"{path}.feed_forward.up_proj": "colwise",
        f"{path}.feed_forward.down_proj": "rowwise",
    }


def _siglip(path: str) -> Plan:
    return {
        f"{path}.self_attn.q_proj": "colwise",
        f"{path}.self_attn.k_proj": "colwise",
        f"{path}.self_attn.v_proj": "colwise",
        f"{path}.self_attn.out_proj": "rowwise",
        f"{path}.mlp.fc1": "colwise",
        f"{path}.mlp.fc2": "rowwise",
    }


def _qwen_blocks(path: str) -> Plan:
    return {
        f"{path}.attn": Divide("num_heads"),
        f"{path}.attn.qkv": PackedColwiseParallel([1, 1, 1]),
        f"{path}.attn.proj": "rowwise",
    }


def _qwen2_vision(path: str) -> Plan:
    return {
        **_qwen_blocks(f"{path}.blocks.*"),
        f"{path}.blocks.*.mlp.gate_proj": "colwise",
        f"{path}.blocks.*.mlp.up_proj": "colwise",
        f"{path}.blocks.*.mlp.down_proj": "rowwise",
        f"{path}.merger.mlp.0": "colwise",
        f"{path}.merger.mlp.2": "rowwise",
    }


def _qwen3_vision(path: str) -> Plan:
    # As wide as a part of the merger's first Linear, this norm would be taken for one within a head.
    plan = {**_qwen_blocks(f"{path}.blocks.*"), f"{path}.merger.norm": "replicate"}
    for mlp in ("blocks.*.mlp", "merger", "deepstack_merger_list.*"):
        plan |= {f"{path}.{mlp}.linear_fc1": "colwise", f"{path}.{mlp}.linear_fc2": "rowwise"}
    return plan


# Qwen's text towers are classes of their own.
PLANS: dict[str, Any] = dict.fromkeys(
    ("Qwen2_5_VLTextModel", "Qwen3VLTextModel"), with_vocabulary(decoder_layers("layers"), "embed_tokens")
)
for _name, _vision in {
    "Mistral3": lambda path: _pixtral(f"{path}vision_tower.transformer.layers.*"),
    "Gemma3": lambda path: _siglip(f"{path}vision_tower.encoder.layers.*"),
    "Qwen2_5_VL": lambda path: _qwen2_vision(f"{path}visual"),
    "Qwen3VL": lambda path: _qwen3_vision(f"{path}visual"),
}.items():
    for _class, _path, _head in (("Model", "", None), ("ForConditionalGeneration", "model.", "lm_head")):
        _text = f"{_path}language_model"
        _plan = {**decoder_layers(f"{_text}.layers"), **_vision(_path)}
        PLANS[f"{_name}{_class}"] = with_vocabulary(_plan, f"{_text}.embed_tokens", head=_head)

PUBLISHED: Published = {
    "Mistral-Small-3.1-24B": ("Mistral3Model", {}),
    "Gemma-3-12B": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {
                "hidden_size": 3840,
                "intermediate_size": 15360,
                "num_hidden_layers": 48,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
            },
            "vision_config": {
                "hidden_size": 1152,
                "intermediate_size": 4304,
                "num_hidden_layers": 27,
                "num_attention_heads": 16,
                "image_size": 896,
                "patch_size": 14,
                "vision_use_head": False,
            },
        },
    ),
    "Qwen2.5-VL-7B": (
        "Qwen2_5_VLForConditionalGeneration",
        {
            "text_config": {
                "hidden_size": 3584,
                "intermediate_size": 18944,
                "num_hidden_layers": 28,
                "num_attention_heads": 28,
                "num_key_value_heads": 4,
            },
            "vision_config": {"hidden_size": 1280},
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3-VL-4B": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                "hidden_size": 2560,
                "intermediate_size": 9728,
                "num_hidden_layers": 36,
                "num_key_value_heads": 8,
            },
            "vision_config": {
                "deepstack_visual_indexes": [5, 11, 17],
                "depth": 24,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "out_hidden_size": 2560,
            },
            "tie_word_embeddings": True,
        },
    ),
}
