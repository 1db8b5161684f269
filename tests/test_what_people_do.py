"""What people do to a diffusers model, done to a sharded one: the numbers are those of a whole one treated alike."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import LayerSkipConfig, apply_layer_skip
from diffusers.models.attention_dispatch import attention_backend

import tp_layers
from close import FLOAT32, relative_error
from families import REGISTERED, digest, run
from families.family import tensors
from tp_layers.group import Group
from tp_layers.plans.shard import sharding_of

FLUX, FLUX2 = "FluxTransformer2DModel", "Flux2Transformer2DModel"
QWEN, WAN = "QwenImageTransformer2DModel", "WanTransformer3DModel, text to video"
LABELS = [FLUX, FLUX2, QWEN, WAN]
labels = pytest.mark.parametrize("label", LABELS)
Deed = Callable[[Any], Any]


def outputs(group: Group | None, label: str, before: str = "", after: str = "") -> tuple[list[torch.Tensor], int]:
    """Of a model treated `before` and `after` it is sharded over `group`; or of a whole one, without a group."""
    model = REGISTERED[label].build()
    # A model's backend becomes everybody's, until the end of the context.
    with attention_backend("native"):
        DEEDS[before](model)
        if group is not None:
            tp_layers.apply(model, group=group)
        DEEDS[after](model)
        found = run(model, REGISTERED[label].inputs(), model.dtype)
    return found, digest(found)


DEEDS: dict[str, Deed] = {
    "": lambda model: None,
    "native attention": lambda model: model.set_attention_backend("native"),
    "attention in plain torch": lambda model: model.set_attention_backend("_native_math"),
    "flash attention": lambda model: model.set_attention_backend("_native_flash"),
    "to float64": lambda model: model.to(torch.float64),
    "double()": lambda model: model.double(),
    "to bfloat16": lambda model: model.to(torch.bfloat16),
    "fused": lambda model: model.fuse_qkv_projections(),
    "unfused": lambda model: model.unfuse_qkv_projections(),
    "a skipped block": lambda model: skip(model, "blocks"),
    "skipped attention scores": lambda model: skip(
        model, "transformer_blocks", skip_attention=False, skip_ff=False, skip_attention_scores=True
    ),
    "a skipped MLP": lambda model: skip(model, "transformer_blocks", skip_attention=False),
    "chunked MLPs": lambda model: model.enable_forward_chunking(2, 1),
}


def skip(model: Any, blocks: str, **what: bool) -> None:
    """Skips parts of the first block, as guidance by a worse model does."""
    apply_layer_skip(model, LayerSkipConfig(indices=[0], fqn=blocks, **what))


# Those with a model that diffusers' own code takes.
FURTHER = [
    ("a skipped block", WAN),
    ("skipped attention scores", QWEN),
    ("a skipped MLP", FLUX),
    ("chunked MLPs", "HunyuanDiT2DModel, plain MLP"),
]
ATTENTION = [
    (name, label)
    for name in ("native attention", "attention in plain torch", "flash attention")
    for label in LABELS
    # Qwen-Image has a mask, which that one does not take.
    if (name, label) != ("flash attention", QWEN)
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("name", "label"), ATTENTION)
def test_attention_runs_in_the_backend_that_was_set(ranks, name, label, when):
    wanted, _ = outputs(None, label, name)
    order = (name, "") if when == "before" else ("", name)
    found = ranks(2, outputs, label, *order)
    assert found[0][1] == found[1][1]
    assert relative_error(found[0][0][0], wanted[0]) <= FLOAT32


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("name", "label"), FURTHER)
def test_parts_of_a_model_are_skipped_or_chunked(ranks, name, label, when):
    wanted, _ = outputs(None, label, name)
    order = (name, "") if when == "before" else ("", name)
    found = ranks(2, outputs, label, *order)
    assert found[0][1] == found[1][1]
    assert relative_error(found[0][0][0], wanted[0]) <= FLOAT32
    plain, _ = outputs(None, label)
    assert "skipped" not in name or relative_error(wanted[0], plain[0]) > 0.1


@labels
@pytest.mark.parametrize("name", ["to float64", "double()"])
def test_a_sharded_model_is_cast_to_float64(ranks, name, label):
    wanted, _ = outputs(None, label, name)
    found = ranks(2, outputs, label, "", name)
    assert found[0][1] == found[1][1]
    assert wanted[0].dtype == torch.float64 and relative_error(found[0][0][0], wanted[0]) <= 1e-12


@labels
def test_casting_to_bfloat16_before_and_after_sharding_is_the_same(ranks, label):
    before, after = (ranks(2, outputs, label, *order) for order in (("to bfloat16", ""), ("", "to bfloat16")))
    assert len({bits for _, bits in before + after}) == 1
    wanted, _ = outputs(None, label, "to bfloat16")
    assert after[0][0][0].dtype == wanted[0].dtype and relative_error(after[0][0][0], wanted[0]) < 0.05


@pytest.mark.parametrize("label", [FLUX, FLUX2, WAN])
def test_projections_may_be_fused_before_sharding_and_unfused_after_it(ranks, label):
    wanted, _ = outputs(None, label, "fused")
    for order in (("fused", ""), ("fused", "unfused")):
        for (got, *_), _ in ranks(2, outputs, label, *order):
            assert relative_error(got, wanted[0]) <= FLOAT32


def gradients(model: Any, label: str) -> tuple[dict[str, torch.Tensor | None], int]:
    """Every parameter's gradient, and how often the first block's queries were made."""
    calls: list[int] = []
    queries = next(module for name, module in model.named_modules() if name.endswith(("attn.to_q", "attn1.to_q")))
    queries.register_forward_hook(lambda *_: calls.append(1))
    inputs = REGISTERED[label].inputs().items()
    exact = {name: value.double() if tensors(value) else value for name, value in inputs}
    sum(found.square().sum() for found in tensors(model.train()(**exact, return_dict=False))).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}, len(calls)


def checkpointed(group: Group, label: str, before: bool) -> tuple[dict[str, float], int]:
    """The gradients' errors against a whole model's, both in float64 and with the blocks computed anew."""
    whole, model = REGISTERED[label].build().double(), REGISTERED[label].build().double()
    whole.enable_gradient_checkpointing()
    if before:
        model.enable_gradient_checkpointing()
    tp_layers.apply(model, group=group)
    if not before:
        model.enable_gradient_checkpointing()
    wanted, _ = gradients(whole, label)
    got, calls = gradients(model, label)
    specs = sharding_of(model).resolved.specs
    assert [name for name in wanted if (wanted[name] is None) != (got[name] is None)] == []
    shares = {
        name: specs[name].take(full, group.rank, group.size) if name in specs else full
        for name, full in wanted.items()
        # That of a bias of all keys is rounding alone: it cancels out in the softmax.
        if full is not None and full.norm() > 1e-10
    }
    return {name: relative_error(got[name], share) for name, share in shares.items()}, calls


@pytest.mark.parametrize("before", [True, False], ids=["before sharding", "after sharding"])
@labels
def test_gradients_are_right_with_blocks_computed_anew(ranks, label, before):
    for errors, calls in ranks(2, checkpointed, label, before):
        assert {name: error for name, error in errors.items() if error > 1e-11} == {}
        assert len(errors) > 20 and calls == 2
