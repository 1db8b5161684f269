"""Tiny models of transformers, every tensor drawn, in the layouts in which they are published."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from close import randomise

TEXT: dict[str, Any] = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, head_dim=4, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
T5: dict[str, Any] = dict(vocab_size=32, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_heads=4)
CLIP: dict[str, Any] = dict(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=16, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip
ROPE: dict[str, Any] = dict(rope_type="default", rope_theta=10000.0)


def qwen_vl() -> dict[str, Any]:
    vision = dict(
        depth=2, hidden_size=16, intermediate_size=24, num_heads=4, out_hidden_size=16, patch_size=2, in_channels=3,
        fullatt_block_indexes=[1], window_size=8, spatial_merge_size=2, temporal_patch_size=2,
    )  # fmt: skip
    text = {**TEXT, "rope_parameters": dict(rope_type="default", rope_theta=1e6, mrope_section=[1, 1, 0])}
    return dict(text_config=text, vision_config=vision, image_token_id=30, video_token_id=31)


def mistral3() -> dict[str, Any]:
    vision = dict(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, image_size=16, patch_size=4,
        num_channels=3, model_type="pixtral",
    )  # fmt: skip
    text = dict(TEXT, model_type="mistral")
    return dict(
        text_config=text, vision_config=vision, image_token_index=30, spatial_merge_size=2, tie_word_embeddings=False
    )


@dataclass(frozen=True)
class TextModel:
    """How to build a tiny model, and layers of it that can be sharded over two ranks."""

    model: str
    config: str
    settings: Callable[[], dict[str, Any]]
    plan: dict[str, str]
    # Names that only the published layout has.
    published: tuple[str, ...] = ()

    @property
    def cls(self) -> Any:
        return getattr(transformers, self.model)

    def build(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings())
        return randomise(self.cls._from_config(config, dtype=dtype)).to(dtype)

    def save(self, folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.build(dtype).save_pretrained(folder, **options)


def decoder(layers: str) -> dict[str, str]:
    """A plan for the attention and the MLP of Llama's kin."""
    return {
        **{f"{layers}.*.self_attn.{name}_proj": "colwise" for name in "qkv"},
        f"{layers}.*.self_attn.o_proj": "rowwise",
        f"{layers}.*.mlp.up_proj": "colwise", f"{layers}.*.mlp.gate_proj": "colwise",
        f"{layers}.*.mlp.down_proj": "rowwise",
    }  # fmt: skip


T5_PLAN = {
    "encoder.block.*.layer.1.DenseReluDense.wi_0": "colwise", "encoder.block.*.layer.1.DenseReluDense.wi_1": "colwise",
    "encoder.block.*.layer.1.DenseReluDense.wo": "rowwise",
}  # fmt: skip
GATED = dict(T5, feed_forward_proj="gated-gelu")

TEXT_MODELS = {
    "T5": TextModel("T5EncoderModel", "T5Config", lambda: GATED, T5_PLAN),
    "UMT5": TextModel("UMT5EncoderModel", "UMT5Config", lambda: GATED, T5_PLAN),
    "CLIP text": TextModel(
        "CLIPTextModel", "CLIPTextConfig", lambda: CLIP,
        {"encoder.layers.*.mlp.fc1": "colwise", "encoder.layers.*.mlp.fc2": "rowwise"},
    ),
    "CLIP text, projected": TextModel(
        "CLIPTextModelWithProjection", "CLIPTextConfig", lambda: dict(CLIP, projection_dim=8),
        {"text_model.encoder.layers.*.mlp.fc1": "colwise", "text_model.encoder.layers.*.mlp.fc2": "rowwise"},
    ),
    "Qwen2.5-VL": TextModel(
        "Qwen2_5_VLForConditionalGeneration", "Qwen2_5_VLConfig", qwen_vl, decoder("model.language_model.layers"),
        ("model.layers.0.self_attn.q_proj.weight", "visual.blocks.0.attn.qkv.weight", "model.embed_tokens.weight"),
    ),
    "Mistral3": TextModel(
        "Mistral3ForConditionalGeneration", "Mistral3Config", mistral3, decoder("model.language_model.layers"),
        ("language_model.model.layers.0.mlp.up_proj.weight", "multi_modal_projector.linear_1.weight",
         "vision_tower.transformer.layers.0.attention.q_proj.weight", "language_model.lm_head.weight"),
    ),
    "Qwen3": TextModel("Qwen3ForCausalLM", "Qwen3Config", lambda: TEXT, decoder("model.layers")),
    "Qwen3, tied": TextModel(
        "Qwen3ForCausalLM", "Qwen3Config", lambda: dict(TEXT, tie_word_embeddings=True), decoder("model.layers")
    ),
    "Llama": TextModel("LlamaModel", "LlamaConfig", lambda: TEXT, decoder("layers")),
    "Gemma2": TextModel("Gemma2Model", "Gemma2Config", lambda: TEXT, decoder("layers")),
    "Gemma3": TextModel("Gemma3ForCausalLM", "Gemma3TextConfig", lambda: TEXT, decoder("model.layers")),
}  # fmt: skip
