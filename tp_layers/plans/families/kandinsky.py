"""Kandinsky 5 (Lite, Pro; image and video) and Kandinsky 6 (video with audio).

The modulations are 12 % to 16 %, and kept in float32. Kandinsky 6 has each block twice, for video and for audio, which
attend to each other, each with its own heads.

Kandinsky 5's sparse attention (NABLA) chooses blocks of keys for each head by itself, so a rank chooses for its own.

Whole: the embedders and the output (under 1 %); the q and k norms, which act within a head.
"""

from ..shared import Plan, Published, feed_forward
from ..styles import Divide


def _attention(path: str) -> Plan:
    return {
        path: Divide("num_heads"),
        f"{path}.to_query": "colwise",
        f"{path}.to_key": "colwise",
        f"{path}.to_value": "colwise",
        f"{path}.out_layer": "rowwise",
    }


def _mlp(path: str) -> Plan:
    return {f"{path}.in_layer": "colwise", f"{path}.out_layer": "rowwise"}


def _text_block(path: str) -> Plan:
    return {
        f"{path}.text_modulation.out_layer": "modulation",
        **_attention(f"{path}.attn"),
        **feed_forward(f"{path}.feed_forward"),
    }


def _decoder_block(path: str) -> Plan:
    return {
        f"{path}.visual_modulation.out_layer": "modulation",
        **_attention(f"{path}.self_attention"),
        **_attention(f"{path}.cross_attention"),
        **feed_forward(f"{path}.feed_forward"),
    }


PLANS = {
    "Kandinsky5Transformer3DModel": {
        "text_transformer_blocks.*.text_modulation.out_layer": "modulation",
        "visual_transformer_blocks.*.visual_modulation.out_layer": "modulation",
        **_attention("text_transformer_blocks.*.self_attention"),
        **_mlp("text_transformer_blocks.*.feed_forward"),
        **_attention("visual_transformer_blocks.*.self_attention"),
        **_attention("visual_transformer_blocks.*.cross_attention"),
        **_mlp("visual_transformer_blocks.*.feed_forward"),
    },
    "Kandinsky6Transformer3DModel": {
        **_text_block("video_text_transformer_blocks.*"),
        **_text_block("audio_text_transformer_blocks.*"),
        **_decoder_block("visual_transformer_blocks.*.video_dec_block"),
        **_decoder_block("visual_transformer_blocks.*.audio_dec_block"),
        "visual_transformer_blocks.*.va_modulation.out_layer": "modulation",
        "visual_transformer_blocks.*.av_modulation.out_layer": "modulation",
        **_attention("visual_transformer_blocks.*.va_cross_attention"),
        **_attention("visual_transformer_blocks.*.av_cross_attention"),
    },
}

PUBLISHED: Published = {
    "Kandinsky-5.0-Lite": (
        "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 16,
            "out_visual_dim": 16,
            "model_dim": 1792,
            "ff_dim": 7168,
            "visual_cond": True,
        },
    ),
    "Kandinsky-5.0-Pro": (
        "Kandinsky5Transformer3DModel",
        {
            "in_visual_dim": 16,
            "out_visual_dim": 16,
            "time_dim": 1024,
            "model_dim": 4096,
            "ff_dim": 16384,
            "num_text_blocks": 4,
            "num_visual_blocks": 60,
            "axes_dims": (32, 48, 48),
            "visual_cond": True,
        },
    ),
    "Kandinsky-6.0-Pro": (
        "Kandinsky6Transformer3DModel",
        {
            "in_audio_dim": 40,
            "out_audio_dim": 40,
            "model_dim_a": 2048,
            "ff_dim_a": 7168,
            "audio_freqs_scaling": 0.144,
            "text_token_padding": True,
            "ca_rope": True,
            "cross_gates": True,
            "fix_modulation": True,
            "visual_token_type_num_embeddings": 2,
        },
    ),
}
