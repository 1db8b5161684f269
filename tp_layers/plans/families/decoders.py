"""Decoders of text that diffusion models read as encoders: Llama, Mistral, Qwen3, SmolLM3, Gemma 2 and 3, GLM.

Attention takes the head's width from its config and the number of heads from the shapes, so no attribute is divided.
Norms of q and k (Qwen3, Gemma 3) act within a head.

The embedding table and the output head are 8 % (SmolLM3) to 23 % (Gemma-2-2B) of a model.

Whole: the norms.
"""

from typing import Any

from ..shared import Plan, Published
from ..styles import PackedColwiseParallel
from ..text import decoder_layers, with_vocabulary


def _glm_layers(path: str) -> Plan:
    """GLM's: gate and up are one Linear."""
    gate, up = f"{path}.*.mlp.gate_proj", f"{path}.*.mlp.up_proj"
    others = {key: style for key, style in decoder_layers(path).items() if key not in (gate, up)}
    return {**others, f"{path}.*.mlp.gate_up_proj": PackedColwiseParallel([1, 1])}


PLANS: dict[str, Any] = {
    "Gemma3TextModel": with_vocabulary(decoder_layers("layers"), "embed_tokens"),
    "GlmModel": with_vocabulary(_glm_layers("layers"), "embed_tokens"),
    "GlmForCausalLM": with_vocabulary(_glm_layers("model.layers"), "model.embed_tokens", head="lm_head"),
}
for _name in ("Llama", "Mistral", "Qwen3", "SmolLM3", "Gemma2"):
    PLANS[f"{_name}Model"] = PLANS["Gemma3TextModel"]
for _name in ("Llama", "Mistral", "Qwen3", "SmolLM3", "Gemma2", "Gemma3"):
    PLANS[f"{_name}ForCausalLM"] = with_vocabulary(decoder_layers("model.layers"), "model.embed_tokens", head="lm_head")

_QWEN3 = {"num_hidden_layers": 36, "num_key_value_heads": 8}
PUBLISHED: Published = {
    "Llama-3.1-8B": (
        "LlamaForCausalLM",
        {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8},
    ),
    "Qwen3-4B": (
        "Qwen3ForCausalLM",
        {**_QWEN3, "hidden_size": 2560, "intermediate_size": 9728, "tie_word_embeddings": True},
    ),
    "Qwen3-8B": ("Qwen3ForCausalLM", {**_QWEN3, "intermediate_size": 12288}),
    "Gemma-2-2B": ("Gemma2Model", {}),
    "SmolLM3-3B": ("SmolLM3ForCausalLM", {}),
    "GLM-4-9B": ("GlmModel", {}),
}
