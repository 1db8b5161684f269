"""Bria 3, FIBO and FIBO 2.

Bria and FIBO have FLUX.1's blocks, whose attention counts its heads; the modulations are 24 % of FIBO. It replaces half
of the text stream's channels before every block by a projection of a layer of the text encoder (`caption_projection`:
2 %, gathered). FIBO 2 has blocks of Z-Image's kind, of which some attend to the text too, and a perceiver for the text;
its modulations are 2 %.

Whole: the embedders and the final projections (under 1 %), the perceiver's queries, and the q and k norms, which act
within a head.
"""

from ..shared import Plan, Published, double_block, self_attention, single_block
from ..styles import Divide

_BRIA: Plan = {
    "transformer_blocks.*.attn": Divide("heads"),
    "single_transformer_blocks.*.attn": Divide("heads"),
    **double_block("transformer_blocks.*"),
    **single_block("single_transformer_blocks.*"),
}


def _attention(path: str) -> Plan:
    return {path: Divide("heads"), **self_attention(path)}


def _gated(path: str) -> Plan:
    return {f"{path}.w1": "colwise", f"{path}.w3": "colwise", f"{path}.w2": "rowwise"}


def _block(path: str) -> Plan:
    return {
        f"{path}.adaLN_modulation.0": "modulation",
        **_attention(f"{path}.attention"),
        **_gated(f"{path}.feed_forward"),
    }


PLANS = {
    "BriaTransformer2DModel": _BRIA,
    "BriaFiboTransformer2DModel": {**_BRIA, "caption_projection.*.linear": "colwise_gather"},
    "BriaFibo2Transformer2DModel": {
        **_block("noise_refiner.*"),
        **_block("layers.*"),
        **_attention("layers.*.cross_attention"),
        **_attention("perceiver.layers.*.cross_attention"),
        **_attention("perceiver.layers.*.self_attention"),
        **_gated("perceiver.layers.*.ffn"),
    },
}

PUBLISHED: Published = {
    "FIBO": ("BriaFiboTransformer2DModel", {"num_layers": 8, "num_single_layers": 38, "in_channels": 48}),
    "FIBO-2": ("BriaFibo2Transformer2DModel", {}),
}
