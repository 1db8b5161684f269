"""Tiny pipelines that draw videos."""

from typing import Any

import diffusers

from .parts import clip, flow, llama, t5, tokenizer, transformer, vae


def _wan(seed: int) -> Any:
    return transformer(
        "WanTransformer3DModel", seed, num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
        text_dim=16, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=16,
    )  # fmt: skip


def wan(two: bool = False) -> Any:
    """Wan 2.1; with `two`, Wan 2.2: a transformer for the first steps and another one for the last."""
    return diffusers.WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(cls="UMT5"),
        vae=vae(
            "AutoencoderKLWan", base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
            temperal_downsample=[False, True, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        transformer=_wan(6),
        transformer_2=_wan(7) if two else None,
        boundary_ratio=0.875 if two else None,
    )  # fmt: skip


def wan22() -> Any:
    return wan(two=True)


def ltx() -> Any:
    """LTX-Video."""
    return diffusers.LTXPipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=vae(
            "AutoencoderKLLTXVideo", latent_channels=8, block_out_channels=(8, 8), decoder_block_out_channels=(8, 8),
            down_block_types=("LTXVideoDownBlock3D",) * 2, layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1), spatio_temporal_scaling=(True, False),
            decoder_spatio_temporal_scaling=(True, False), decoder_inject_noise=(False, False, False),
            downsample_type=("conv", "conv"), upsample_residual=(False, False), upsample_factor=(1, 1), patch_size=1,
            patch_size_t=1, encoder_causal=True, decoder_causal=False,
        ),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=transformer(
            "LTXVideoTransformer3DModel", in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=16,
            cross_attention_dim=32, num_layers=2, caption_channels=16,
        ),
    )  # fmt: skip


def hunyuan_video() -> Any:
    """HunyuanVideo: Llama and CLIP."""
    return diffusers.HunyuanVideoPipeline(
        text_encoder=llama(),
        tokenizer=tokenizer(),
        transformer=transformer(
            "HunyuanVideoTransformer3DModel", in_channels=4, out_channels=4, num_attention_heads=2,
            attention_head_dim=16, num_layers=1, num_single_layers=1, num_refiner_layers=1, mlp_ratio=2.0,
            text_embed_dim=16, pooled_projection_dim=16, rope_axes_dim=(4, 6, 6),
        ),
        vae=vae(
            "AutoencoderKLHunyuanVideo", latent_channels=4, down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4, block_out_channels=(4, 4, 4, 4), layers_per_block=1,
            norm_num_groups=2, mid_block_add_attention=True,
        ),
        scheduler=flow(),
        text_encoder_2=clip(max_position_embeddings=77),
        tokenizer_2=tokenizer(77),
    )  # fmt: skip


def cogvideox() -> Any:
    """CogVideoX."""
    return diffusers.CogVideoXPipeline(
        tokenizer=tokenizer(),
        text_encoder=t5(),
        vae=vae(
            "AutoencoderKLCogVideoX", latent_channels=4, down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(4, 4, 4, 4), layers_per_block=1,
            norm_num_groups=2, scaling_factor=1.0,
        ),
        transformer=transformer(
            "CogVideoXTransformer3DModel", num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
            time_embed_dim=8, text_embed_dim=16, num_layers=2, sample_width=4, sample_height=4, sample_frames=9,
            max_text_seq_length=16,
        ),
        scheduler=diffusers.CogVideoXDDIMScheduler(),
    )  # fmt: skip


SMALL = dict(height=32, width=32, num_frames=5, max_sequence_length=16)
VIDEO = {
    "Wan": (wan, dict(SMALL, negative_prompt="a cat", guidance_scale=3.0)),
    "Wan 2.2": (wan22, dict(SMALL, negative_prompt="a cat", guidance_scale=3.0)),
    "LTX": (ltx, dict(SMALL, num_frames=3, negative_prompt="a cat", guidance_scale=3.0)),
    "HunyuanVideo": (hunyuan_video, SMALL),
    "CogVideoX": (cogvideox, dict(SMALL, num_frames=9, negative_prompt="a cat", guidance_scale=3.0)),
}
