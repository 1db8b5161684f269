"""Z-Image (Turbo, Base, and Omni with its SigLIP refiner).

Three or four stacks of one kind of block; the two refiners of text and SigLIP features have no modulation, which is 2 %
of the rest. `n_kv_heads` is in the config but not in the attention: keys and values have as many heads as queries.

Whole: the embedders and the final layer (under 1 %), and the q and k norms, which act within a head.
"""

from typing import Any

from ..shared import Published, self_attention
from ..styles import Divide


def _block(path: str) -> dict[str, Any]:
    return {
        f"{path}.attention": Divide("heads"),
        **self_attention(f"{path}.attention"),
        f"{path}.feed_forward.w1": "colwise",
        f"{path}.feed_forward.w3": "colwise",
        f"{path}.feed_forward.w2": "rowwise",
    }


PLANS = {
    "ZImageTransformer2DModel": {
        "noise_refiner.*.adaLN_modulation.0": "modulation",
        **_block("noise_refiner.*"),
        **_block("context_refiner.*"),
        **{f"{key.removesuffix('?')}?": style for key, style in _block("siglip_refiner.*").items()},
        "layers.*.adaLN_modulation.0": "modulation",
        **_block("layers.*"),
    }
}

PUBLISHED: Published = {
    "Z-Image": ("ZImageTransformer2DModel", {}),
    "Z-Image-Turbo": ("ZImageTransformer2DModel", {"axes_lens": [1536, 512, 512]}),
}
