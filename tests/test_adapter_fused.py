"""Adapters on a model whose blocks are fused: what one changes, the other must not lose."""

from typing import Any

import pytest
import torch

import tp_layers
from close import FLOAT32, compare, relative_error
from families import REGISTERED, digest, run
from loras import draw, fused, keys, write
from tp_layers.group import Group

LABELS = ["FluxTransformer2DModel", "Flux2Transformer2DModel", "WanTransformer3DModel", "LTXVideoTransformer3DModel"]
# One layer of those that are computed together, or of a fused block, has an adapter.
CASES = [
    *((label, "") for label in LABELS),
    ("FluxTransformer2DModel", "to_k"),
    ("FluxTransformer2DModel", "proj_mlp"),
    ("FluxTransformer2DModel", "proj_out"),
    ("Flux2Transformer2DModel", "to_qkv_mlp_proj"),
    ("Flux2Transformer2DModel", "attn.to_out"),
    ("LTXVideoTransformer3DModel", "to_v"),
]


def outputs(group: Group, label: str, file: str) -> list[tuple[list[torch.Tensor], int]]:
    """Without an adapter, with it, turned off, turned on, and taken away."""
    family = next(family for name, family in REGISTERED.items() if name.split(",")[0] == label)
    model = tp_layers.apply(family.build(), group=group, fuse=True)
    found: list[Any] = []

    def note() -> None:
        result = run(model, family.inputs())
        found.append((result, digest(result)))

    note()
    name = tp_layers.load_adapter(model, file, 0.5)
    note()
    tp_layers.set_adapters(model, [])
    note()
    tp_layers.set_adapters(model, name, 0.5)
    note()
    tp_layers.unload_adapter(model, name)
    note()
    return found


@pytest.mark.parametrize(("label", "only"), CASES, ids=lambda value: value or "every layer")
def test_adapters_on_fused_blocks(ranks, tmp_path, label, only):
    family = next(family for name, family in REGISTERED.items() if name.split(",")[0] == label)
    lora = draw(family.build(), (4,), only=only)
    file = write(tmp_path / "lora.safetensors", keys(lora))
    plain = run(family.build(), family.inputs())
    adapted = run(fused(family.build(), (lora, 0.5)), family.inputs())
    assert relative_error(plain[0], adapted[0]) > 0.01
    results = ranks(2, outputs, label, file)
    for number, wanted in enumerate((plain, adapted, plain, adapted, plain)):
        assert compare([result[number] for result in results], wanted) <= FLOAT32
