"""Decoders of text: Llama, Mistral, Qwen3, SmolLM3, Gemma 2 and 3, GLM; alone and with the head that gives logits."""

import torch

from .family import Family, Values


def decoder(heads: int) -> Values:
    # Four kv heads, so that each of four ranks has one.
    return dict(
        vocab_size=56, hidden_size=40, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2 * heads,
        num_key_value_heads=heads, head_dim=10, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
        pad_token_id=0, sliding_window=3, attn_implementation="sdpa", tie_word_embeddings=False,
    )  # fmt: skip


def eager(heads: int) -> Values:
    return decoder(heads) | dict(attn_implementation="eager")


def tied(heads: int) -> Values:
    return eager(heads) | dict(tie_word_embeddings=True)


def every_bias(heads: int) -> Values:
    return decoder(heads) | dict(attention_bias=True, mlp_bias=True)


def gemma(heads: int) -> Values:
    # One layer of each kind of attention.
    return tied(heads) | dict(layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=10)


def smollm3(heads: int) -> Values:
    # One layer with rotary positions, one without.
    return tied(heads) | dict(no_rope_layers=[1, 0])


def glm(heads: int) -> Values:
    return decoder(heads) | dict(head_dim=12, attention_bias=True)


def prompt() -> Values:
    return dict(
        input_ids=torch.tensor([[3, 55, 17, 28, 41, 9], [14, 30, 2, 44, 0, 0]]),
        attention_mask=torch.tensor([[1] * 6, [1] * 4 + [0] * 2]), output_hidden_states=True, use_cache=False,
    )  # fmt: skip


# A name, its config's class, and what else its config has, alone and with a head.
MODELS = [
    ("Llama", "LlamaConfig", every_bias, eager),
    ("Mistral", "MistralConfig", decoder, eager),
    ("Qwen3", "Qwen3Config", every_bias, tied),
    ("SmolLM3", "SmolLM3Config", smollm3, smollm3),
    ("Gemma2", "Gemma2Config", gemma, gemma),
    ("Gemma3", "Gemma3TextConfig", gemma, gemma),
    ("Glm", "GlmConfig", glm, glm),
]
FAMILIES = [
    Family("Gemma3TextModel" if name == "Gemma3" else f"{name}Model", alone, prompt, config_class=config_class)
    for name, config_class, alone, _ in MODELS
]
FAMILIES += [
    Family(f"{name}ForCausalLM", with_head, prompt, config_class=config_class)
    for name, config_class, _, with_head in MODELS
]
FAMILIES += [
    Family("Qwen3ForCausalLM", decoder, prompt, variant="untied", config_class="Qwen3Config"),
    Family(
        "LlamaForCausalLM",
        lambda heads: eager(heads) | dict(vocab_size=57),
        prompt,
        variant="a vocabulary that does not divide",
        config_class="LlamaConfig",
    ),
]
