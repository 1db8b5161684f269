"""Pieces of plans for models built of Wan's blocks, and for others whose q and k norms run over all heads at once."""

from .shared import Plan, feed_forward, self_attention
from .styles import Divide


def attention(path: str) -> Plan:
    """Attention that reads its number of heads, and normalises q and k over all of them at once."""
    return {
        path: Divide("heads"),
        **self_attention(path),
        f"{path}.norm_q": "rms_norm",
        f"{path}.norm_k": "rms_norm",
    }


def wan_block(path: str) -> Plan:
    """Self-attention, attention to the text, and the MLP."""
    return {**attention(f"{path}.attn1"), **attention(f"{path}.attn2"), **feed_forward(f"{path}.ffn")}


def image_keys(path: str) -> Plan:
    """What attention to the text has besides where it attends to an image too: further keys and values."""
    return {f"{path}.add_k_proj?": "colwise", f"{path}.add_v_proj?": "colwise", f"{path}.norm_added_k?": "rms_norm"}
