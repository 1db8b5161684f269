"""Helios, made of Wan's blocks, whose self-attention may amplify the keys of the frames before.

The scale of those keys is a parameter with one number for each head, of which a rank has its own, or one for all heads,
which stays whole and whose gradient is summed, as each rank's is of its own heads only.

Whole: the timestep projection (1.1 %), as a rank needs all of it; the patch and text embedders (under 1 %).
"""

from typing import Any

from torch import nn

from ..shared import Plan, Published
from ..styles import ShardParameter
from ..wan_blocks import image_keys, wan_block


def helios(model: nn.Module) -> Plan:
    """The plan, by what the keys' scale is in the config of `model`."""
    config: Any = model.config
    # With `added_kv_proj_dim`, attention has the keys of an image, and its forward does not call them.
    plan = {
        "condition_embedder.time_proj": "modulation",
        **wan_block("blocks.*"),
        **image_keys("blocks.*.attn2"),
    }
    if config.is_amplify_history:
        by_head = config.history_scale_mode == "per_head"
        plan["blocks.*.attn1.history_key_scale"] = ShardParameter(0) if by_head else "replicated_with_grad_allreduce"
    return plan


PLANS = {"HeliosTransformer3DModel": helios}

PUBLISHED: Published = {"Helios": ("HeliosTransformer3DModel", {})}
