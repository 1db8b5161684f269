"""Fused blocks give what unfused and unsharded ones give, and are taken where they should be."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

import tp_layers
from close import FLOAT32, compare, relative_error
from families import FAMILIES, ONE_OF_EACH, REGISTERED, digest, run
from families.family import backward
from functions import Functions
from test_gradients import EXACT
from tp_layers import ColwiseLinear, RowwiseLinear
from tp_layers.group import Group
from tp_layers.kernels import backend
from tp_layers.layers.epilogue import Activation, Gated
from tp_layers.layers.flux2 import ParallelSelfAttention
from tp_layers.layers.fused import FusedProjection, FusedSwiGLU

FLUX, FLUX2 = "FluxTransformer2DModel", "Flux2Transformer2DModel"
# One for each kind of feed-forward network, with what its activation is fused to.
KINDS = {
    FLUX: Activation("gelu_tanh"),
    "Kandinsky6Transformer3DModel": Activation("gelu"),
    "PixArtTransformer2DModel, gated": Gated("gelu", gate_first=False),
    "MochiTransformer3DModel": Gated("silu", gate_first=False),
    "HunyuanVideoTransformer3DModel, text": Activation("silu"),
    FLUX2: None,
    "Flux3Transformer2DModel": None,
}


def count_within(module: nn.Module) -> Counter[str]:
    """From now on the functions of torch that `module` calls."""
    functions = Functions()
    module.register_forward_pre_hook(lambda *_: [functions.__enter__()].clear())
    module.register_forward_hook(lambda *_: functions.__exit__(None, None, None))
    return functions.counts


def sharded(group: Group, label: str, fuse: bool, **how: Any) -> nn.Module:
    return tp_layers.apply(REGISTERED[label].build(), group=group, fuse=fuse, **how)


def both(group: Group, label: str, uneven: bool = False) -> dict[str, Any]:
    """The outputs fused and unfused, and what was fused."""
    fused, single = (sharded(group, label, fuse, uneven=uneven) for fuse in (True, False))
    outputs = run(fused, REGISTERED[label].inputs())
    modules = list(fused.modules())
    assert not any(isinstance(module, FusedProjection | FusedSwiGLU) for module in single.modules())
    return {
        "outputs": outputs,
        "bits": digest(outputs),
        "single": run(single, REGISTERED[label].inputs()),
        "epilogues": {module.epilogue for module in modules if isinstance(module, FusedProjection)},
        "swiglu": sum(isinstance(module, FusedSwiGLU) for module in modules),
        "together": sum(isinstance(module, ColwiseLinear) and module.together is not None for module in modules),
    }


@pytest.mark.parametrize("label", KINDS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_fused_blocks_equal_the_unfused_and_the_unsharded(ranks, size, label):
    wanted = run(REGISTERED[label].build(), REGISTERED[label].inputs())
    found = ranks(size, both, label)
    assert len({it["bits"] for it in found}) == 1
    for it in found:
        for got, single, reference in zip(it["outputs"], it["single"], wanted, strict=True):
            assert relative_error(got, reference) <= FLOAT32 and relative_error(got, single) <= FLOAT32
        kind = KINDS[label]
        assert it["together"] >= 3 or "Kandinsky" in label
        assert it["swiglu"] >= 2 if kind is None else kind in it["epilogues"]


@pytest.mark.parametrize("label", [FLUX, FLUX2])
def test_unequal_parts_are_fused_alike(ranks, label):
    wanted = run(REGISTERED[label].build(), REGISTERED[label].inputs())
    found = ranks(3, both, label, True)
    assert compare([(it["outputs"], it["bits"]) for it in found], wanted) <= FLOAT32


EVERY = (pytest.mark.slow, pytest.mark.families)


@pytest.mark.parametrize("label", [pytest.param(label, marks=EVERY) for label in ONE_OF_EACH])
def test_every_family_can_be_fused(ranks, label):
    wanted = run(REGISTERED[label].build(), REGISTERED[label].inputs())
    found = ranks(2, both, label)
    assert compare([(it["outputs"], it["bits"]) for it in found], wanted) <= FLOAT32


def halves(group: Group, label: str) -> list[torch.Tensor]:
    model = tp_layers.apply(REGISTERED[label].build(dtype=torch.bfloat16), group=group, fuse=True)
    return run(model, REGISTERED[label].inputs(), torch.bfloat16)


@pytest.mark.parametrize("label", [FLUX, FLUX2])
def test_bfloat16_is_at_most_twice_as_far_from_float64_as_one_device(ranks, label):
    family = REGISTERED[label]
    (exact,) = run(nn.Module.to(family.build(dtype=torch.bfloat16), torch.float64), family.inputs(), torch.float64)
    (single,) = run(family.build(dtype=torch.bfloat16), family.inputs(), torch.bfloat16)
    own = relative_error(single, exact)
    assert own < 0.05
    for size in (2, 4):
        for (got,) in ranks(size, halves, label):
            assert relative_error(got, exact) <= 2 * own


def gradients(group: Group, label: str) -> dict[str, torch.Tensor | None]:
    model = nn.Module.to(REGISTERED[label].build(), EXACT)
    return backward(tp_layers.apply(model, group=group, fuse=True), REGISTERED[label].inputs(), EXACT, calls=2)


@pytest.mark.parametrize("label", [FLUX, FLUX2])
def test_gradients_are_those_of_one_device(ranks, label):
    wanted = backward(nn.Module.to(REGISTERED[label].build(), EXACT), REGISTERED[label].inputs(), EXACT, calls=2)
    for found in ranks(1, gradients, label):
        assert all(relative_error(found[key], full) <= 1e-12 for key, full in wanted.items())
    # Of what is whole on both ranks.
    for found in ranks(2, gradients, label):
        alike = [key for key, full in wanted.items() if found[key].shape == full.shape]
        assert len(alike) > 5 and all(relative_error(found[key], wanted[key]) <= 1e-12 for key in alike)


def counted(group: Group, label: str, fuse: bool) -> tuple[Counter[str], Counter[str], list[int]]:
    """The functions that a double and a single block call, and in how many parts each rowwise layer gets its input."""
    model: Any = sharded(group, label, fuse)
    parts: list[int] = []
    double, single = map(count_within, (model.transformer_blocks[0], model.single_transformer_blocks[0]))
    for module in model.modules():
        if isinstance(module, RowwiseLinear):
            module.register_forward_pre_hook(
                lambda _, args: parts.append(len(args[0]) if type(args[0]) is tuple else 1)
            )
    run(model, REGISTERED[label].inputs())
    return double, single, parts


def test_flux_takes_the_fused_path(ranks):
    (double, single, parts), _ = ranks(2, counted, FLUX, True)
    before_double, before_single, before_parts = ranks(2, counted, FLUX, False)[0]
    # q, k, v of both streams: two GEMMs of six; q, k, v and the MLP: one of four.
    assert (before_double["linear"], double["linear"]) == (14, 10)
    assert (before_single["linear"], single["linear"]) == (6, 3)
    assert (before_parts, parts) == ([1] * 6, [1] * 4 + [2] * 2)
    # The twin of the packed rowwise kernel has the one that is left beside those of text and image.
    assert before_single["cat"] == single["cat"]


def test_flux2_takes_the_fused_path(ranks):
    double, _, parts = ranks(2, counted, FLUX2, True)[0]
    before, _, before_parts = ranks(2, counted, FLUX2, False)[0]
    # The rowwise layers of the double block write to the buffer that both streams share.
    assert (before["linear"], before["mm"], double["linear"], double["mm"]) == (12, 0, 4, 4)
    assert (before_parts, parts) == ([1] * 6, [1] * 4 + [2] * 2)


def kept(group: Group) -> list[str]:
    model: Any = sharded(group, FLUX2, True)
    run(model, REGISTERED[FLUX2].inputs())
    return [type(block.attn.processor).__name__ for block in model.single_transformer_blocks]


def test_the_default_is_what_the_table_says(ranks, monkeypatch):
    ours = ParallelSelfAttention.__name__
    assert ranks(1, kept) == [[ours, ours]]
    assert not backend.fuses("cpu") and backend.fuses("cuda") and not backend.fuses("mps")
    for fused in (True, False):
        monkeypatch.setitem(backend.FUSED, "cpu", fused)
        model: Any = tp_layers.apply(FAMILIES[FLUX2].build(), group=Group())
        assert (type(model.single_transformer_blocks[0].attn.processor).__name__ == ours) == fused
        assert ("one GEMM" in repr(model)) == fused


def test_full_weights_in_place_are_fused_but_not_joined(ranks):
    wanted = run(REGISTERED[FLUX2].build(), REGISTERED[FLUX2].inputs())
    for found in ranks(2, in_place):
        assert relative_error(found, wanted[0]) <= FLOAT32


def in_place(group: Group) -> torch.Tensor:
    model = sharded(group, FLUX2, True, copy=False)
    assert any(isinstance(module, FusedSwiGLU) for module in model.modules()) and "one GEMM" not in repr(model)
    return run(model, REGISTERED[FLUX2].inputs())[0]
