"""CogVideoX 1.0 and 1.5, and ConsisID."""

import torch

from .family import Family, Values, noise


def cogvideox(heads: int) -> Values:
    return dict(
        num_attention_heads=heads, attention_head_dim=12, in_channels=3, out_channels=3, time_embed_dim=10,
        text_embed_dim=20, num_layers=2, sample_width=6, sample_height=4, sample_frames=5, max_text_seq_length=5,
    )  # fmt: skip


def with_offset(heads: int) -> Values:
    return cogvideox(heads) | dict(
        use_rotary_positional_embeddings=True, patch_size_t=2, ofs_embed_dim=10, patch_bias=False
    )


def consisid(heads: int) -> Values:
    return cogvideox(heads) | dict(
        num_layers=3, is_train_face=True, cross_attn_dim_head=8, cross_attn_num_heads=heads, LFE_id_dim=14,
        LFE_vit_dim=18, LFE_depth=2, LFE_dim_head=6, LFE_num_heads=heads, LFE_num_id_token=2, LFE_num_querie=3,
        LFE_output_dim=heads * 8, LFE_ff_mult=2, LFE_num_scale=2, cross_attn_interval=1,
    )  # fmt: skip


def inputs() -> Values:
    return dict(
        hidden_states=noise(2, 2, 3, 4, 6), encoder_hidden_states=noise(2, 5, 20, seed=2),
        timestep=torch.tensor([300, 700]),
    )  # fmt: skip


def offset_inputs() -> Values:
    # Two frames are one patch, of 2 x 3 tokens.
    angles = noise(6, 12, seed=3)
    return inputs() | dict(image_rotary_emb=(angles.cos(), angles.sin()), ofs=torch.tensor([2.0, 2.0]))


def consisid_inputs() -> Values:
    return inputs() | dict(
        id_cond=noise(2, 14, seed=3), id_vit_hidden=[noise(2, 4, 18, seed=4), noise(2, 4, 18, seed=5)]
    )


FAMILIES = [
    Family("CogVideoXTransformer3DModel", cogvideox, inputs, "1.0"),
    Family("CogVideoXTransformer3DModel", with_offset, offset_inputs, "1.5"),
    Family("ConsisIDTransformer3DModel", consisid, consisid_inputs),
]
