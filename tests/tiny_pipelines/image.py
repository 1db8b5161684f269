"""Tiny pipelines that draw images."""

from typing import Any

import diffusers

from .parts import clip, flow, qwen, t5, tokenizer, transformer, vae

# Two stages: one latent pixel for two by two of the image.
KL = dict(
    down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2, block_out_channels=(4, 8),
    norm_num_groups=2, latent_channels=2, scaling_factor=1.0, shift_factor=0.1, use_quant_conv=False,
    use_post_quant_conv=False,
)  # fmt: skip


def flux() -> Any:
    """FLUX.1: CLIP and T5."""
    return diffusers.FluxPipeline(
        scheduler=flow(),
        vae=vae("AutoencoderKL", **KL),
        text_encoder=clip(),
        tokenizer=tokenizer(),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
        transformer=transformer(
            "FluxTransformer2DModel", num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            in_channels=8, joint_attention_dim=16, pooled_projection_dim=16, guidance_embeds=True,
            axes_dims_rope=(4, 4, 8),
        ),
    )  # fmt: skip


def qwenimage() -> Any:
    """Qwen-Image: Qwen2.5-VL."""
    return diffusers.QwenImagePipeline(
        scheduler=flow(),
        vae=vae(
            "AutoencoderKLQwenImage", base_dim=4, z_dim=4, dim_mult=[1, 1], num_res_blocks=1,
            temperal_downsample=[False], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
        ),
        text_encoder=qwen(),
        tokenizer=tokenizer(),
        transformer=transformer(
            "QwenImageTransformer2DModel", in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=16, axes_dims_rope=(4, 4, 8),
        ),
    )  # fmt: skip


def sd3() -> Any:
    """Stable Diffusion 3: two CLIPs and T5."""
    projected = "CLIPTextModelWithProjection"
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer(
            "SD3Transformer2DModel", sample_size=8, patch_size=1, in_channels=2, out_channels=2, num_layers=2,
            attention_head_dim=16, num_attention_heads=2, joint_attention_dim=32, caption_projection_dim=32,
            pooled_projection_dim=16,
        ),
        scheduler=flow(),
        vae=vae("AutoencoderKL", **KL),
        text_encoder=clip(projected, projection_dim=8),
        tokenizer=tokenizer(),
        text_encoder_2=clip(projected, seed=7, projection_dim=8, hidden_act="gelu"),
        tokenizer_2=tokenizer(),
        text_encoder_3=t5(32),
        tokenizer_3=tokenizer(),
    )  # fmt: skip


IMAGE = {
    "Flux": (flux, dict(height=16, width=24, max_sequence_length=16)),
    "QwenImage": (qwenimage, dict(height=8, width=12, negative_prompt="a cat", true_cfg_scale=2.0)),
    "StableDiffusion3": (sd3, dict(height=16, width=16, negative_prompt="a cat", max_sequence_length=16)),
}
