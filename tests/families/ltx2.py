"""LTX-2 with either kind of rotary table, LTX-2.3 with gates and perturbed blocks, and the refiner of SANA-WM."""

from typing import Any

import diffusers
import torch
from diffusers.models.transformers.transformer_sana_wm_refiner import SanaWMRefinerKVCache

from .family import Family, Values, noise


def ltx2(heads: int) -> Values:
    return dict(
        in_channels=6, out_channels=6, num_attention_heads=heads, attention_head_dim=16, cross_attention_dim=heads * 16,
        audio_in_channels=5, audio_out_channels=5, audio_num_attention_heads=heads, audio_attention_head_dim=12,
        audio_cross_attention_dim=heads * 12, num_layers=2, caption_channels=24, rope_type="split",
    )  # fmt: skip


def interleaved(heads: int) -> Values:
    return ltx2(heads) | dict(rope_type="interleaved")


def ltx23(heads: int) -> Values:
    return ltx2(heads) | dict(
        gated_attn=True, cross_attn_mod=True, audio_gated_attn=True, audio_cross_attn_mod=True, perturbed_attn=True,
        use_prompt_embeddings=False,
    )  # fmt: skip


def inputs(video_text: int = 24, audio_text: int = 24) -> Values:
    return dict(
        hidden_states=noise(2, 6, 6), audio_hidden_states=noise(2, 4, 5, seed=2), num_frames=1, height=2, width=3,
        encoder_hidden_states=noise(2, 5, video_text, seed=3), audio_num_frames=4,
        audio_encoder_hidden_states=noise(2, 5, audio_text, seed=4), timestep=torch.tensor([[100] * 3 + [700] * 3] * 2),
        audio_timestep=torch.tensor([[200, 200, 500, 500]] * 2),
        encoder_attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2]),
        audio_encoder_attention_mask=torch.tensor([[1] * 4 + [0], [1] * 5]),
    )  # fmt: skip


def ltx23_inputs() -> Values:
    # The first video's second block takes the values as its self-attention; no mask is in the way of the other's.
    masks = {"video_self_attention_mask": 1 - torch.eye(6).repeat(2, 1, 1) * 0.5}
    guided = {"spatio_temporal_guidance_blocks": [1], "perturbation_mask": torch.tensor([0.0, 1.0])}
    sigmas = {"sigma": torch.tensor([300.0, 700.0]), "audio_sigma": torch.tensor([200.0, 500.0])}
    return inputs(64, 48) | masks | guided | sigmas | {"use_cross_timestep": True}


class Refiner(diffusers.SanaWMLTX2RefinerTransformer3DModel):
    """Takes up one frame as the sink, then refines the next against its keys and values."""

    def forward(self, frames: list[torch.Tensor], **kwargs: Any) -> Any:
        tables = [self.build_rotary_emb_for_absolute_positions(2, [at], 2, 3, "cpu", 24.0) for at in (0, 1)]
        cache = SanaWMRefinerKVCache(len(self.transformer_blocks))
        for latents, table, mode in zip(frames, tables, ("capture_pre_rope", "inject"), strict=True):
            output = super().forward(latents, video_rotary_emb=table, kv_cache=cache, kv_cache_mode=mode, **kwargs)
            if mode == "capture_pre_rope":
                for layer in cache.layer_caches:
                    layer.store_sink(*layer.get_captured_pre_rope())
                cache.sink_pe = table
        return output


def refiner(heads: int) -> Values:
    return ltx2(heads) | dict(gated_attn=True, audio_gated_attn=True, audio_cross_attn_mod=True)


def refiner_inputs() -> Values:
    kept = ("encoder_hidden_states", "encoder_attention_mask", "timestep")
    return {name: inputs()[name] for name in kept} | {"frames": [noise(2, 6, 6), noise(2, 6, 6, seed=2)]}


FAMILIES = [
    Family("LTX2VideoTransformer3DModel", ltx2, inputs, "split tables"),
    Family("LTX2VideoTransformer3DModel", interleaved, inputs, "interleaved tables"),
    Family("LTX2VideoTransformer3DModel", ltx23, ltx23_inputs, "gated and perturbed"),
    # The modules of audio, and of what audio needs, have weights, which nothing reads.
    Family("SanaWMLTX2RefinerTransformer3DModel", refiner, refiner_inputs, dead="audio|av_cross|prompt", model=Refiner),
]
