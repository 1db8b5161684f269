"""LTX-2, 2.3 and 2.5, of video and audio, and the refiner of SANA-WM, which has their modules and runs those of video.

The q and k norms of all six attentions of a block run over all heads at once, so they are normalised across ranks. The
rotary tables have a dim of heads ("split") or of all heads' channels ("interleaved", applied before the heads are
split): each rank takes its own. The gates of 2.3, one for each head and token, are split as the heads are.

Whole: the timestep modulations (1.8 % of LTX-2.3), of which a rank needs all, for every token; the projections of
captions and latents (under 1 %).
"""

from typing import Any

from torch import nn

from ..shared import Plan, Published, feed_forward_of
from ..styles import SliceOutput
from ..wan_blocks import attention

_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_ROPES = ("rope", "audio_rope", "cross_attn_rope", "cross_attn_audio_rope")
_MODULATIONS = (
    "time_embed",
    "audio_time_embed",
    "av_cross_attn_video_scale_shift",
    "av_cross_attn_audio_scale_shift",
    "av_cross_attn_video_a2v_gate",
    "av_cross_attn_audio_v2a_gate",
)


def ltx2(model: nn.Module) -> Plan:
    """The plan, by the kind of rotary tables in the config of `model`."""
    config: Any = model.config
    # [batch, heads, tokens, frequencies] or [batch, tokens, channels]
    tables = SliceOutput(1 if config.rope_type == "split" else -1)
    plan: Plan = dict.fromkeys(_ROPES, tables)
    for name in _MODULATIONS:
        plan[f"{name}.linear"] = "modulation"
    for name in ("prompt_adaln", "audio_prompt_adaln"):
        plan[f"{name}.linear?"] = "modulation"
    for name in _ATTENTIONS:
        plan |= attention(f"transformer_blocks.*.{name}")
        plan[f"transformer_blocks.*.{name}.to_gate_logits?"] = "colwise"
    for name in ("ff", "audio_ff"):
        plan |= feed_forward_of(model, f"transformer_blocks.*.{name}")
    return plan


PLANS = {"LTX2VideoTransformer3DModel": ltx2, "SanaWMLTX2RefinerTransformer3DModel": ltx2}

_GATED = ("gated_attn", "cross_attn_mod", "audio_gated_attn", "audio_cross_attn_mod", "perturbed_attn")

PUBLISHED: Published = {
    "LTX-2": ("LTX2VideoTransformer3DModel", {"rope_type": "split"}),
    "LTX-2.3": (
        "LTX2VideoTransformer3DModel",
        {"rope_type": "split", "use_prompt_embeddings": False, **dict.fromkeys(_GATED, True)},
    ),
    "SANA-WM-refiner": ("SanaWMLTX2RefinerTransformer3DModel", {"rope_type": "split"}),
}
