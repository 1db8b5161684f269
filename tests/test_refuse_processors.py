"""Attention processors with projections of their own are refused, before and after sharding; others stay right."""

import copy

import pytest
import torch
from diffusers.models.attention_processor import (
    PAGCFGHunyuanAttnProcessor2_0,
    PAGHunyuanAttnProcessor2_0,
    PAGJointAttnProcessor2_0,
    SD3IPAdapterJointAttnProcessor2_0,
)
from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor
from torch import nn

from close import FLOAT32, relative_error
from families import REGISTERED, run
from refused import refused
from tp_layers import apply
from tp_layers.group import Group
from tp_layers.plans.registry import plan_for

FLUX = REGISTERED["FluxTransformer2DModel"]
SD3 = REGISTERED["SD3Transformer2DModel, without q and k norms"]
HUNYUAN = REGISTERED["HunyuanDiT2DModel, plain MLP"]
TWO = Group(0, 2)
FIRST = "transformer_blocks.0.attn"


class Plain(nn.Module):
    """A processor that is a module, without weights."""

    def __call__(self, attn, hidden_states, **kwargs):
        raise NotImplementedError


class Weighted(Plain):
    """A processor with a projection of its own."""

    def __init__(self):
        super().__init__()
        self.to_k_image = nn.Linear(12, 64)


class OwnIPAdapterProcessor:
    """A processor that is no module, and keeps its projections elsewhere."""

    def __call__(self, attn, hidden_states, **kwargs):
        raise NotImplementedError


def with_processor(family, processor, path=FIRST):
    model = family.build()
    model.get_submodule(path).set_processor(processor)
    return model


REFUSED = {
    "sd3_ip_adapter": (
        lambda: with_processor(SD3, SD3IPAdapterJointAttnProcessor2_0(64, 32, 16, 20)),
        ["is an IP-adapter (SD3IPAdapterJointAttnProcessor2_0)", "unload it first"],
    ),
    "flux_ip_adapter": (
        lambda: with_processor(FLUX, FluxIPAdapterAttnProcessor(64, 32)),
        ["is an IP-adapter (FluxIPAdapterAttnProcessor)", "unload it first"],
    ),
    "an_ip_adapter_of_its_own": (
        lambda: with_processor(SD3, OwnIPAdapterProcessor()),
        ["is an IP-adapter (OwnIPAdapterProcessor)"],
    ),
    "weights_of_its_own": (
        lambda: with_processor(FLUX, Weighted()),
        ["(Weighted) has weights of its own", "plan them, or set another"],
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_a_processor_that_makes_all_heads_is_refused(build, message):
    model = build()
    with refused(model, f"the processor of '{FIRST}'", "would make all heads", *message):
        apply(model, group=TWO)


def test_other_processors_are_not_refused():
    # A module without weights, one whose weights the plan names, and one outside the plan.
    assert apply(with_processor(FLUX, Plain()), group=Group())
    planned = with_processor(FLUX, Weighted())
    assert apply(planned, {**plan_for(planned), f"{FIRST}.processor.to_k_image": "colwise"}, group=Group())
    outside = with_processor(FLUX, Weighted())
    rest = {key: value for key, value in plan_for(outside).items() if not key.startswith("transformer_blocks.*.attn")}
    assert apply(outside, rest, group=Group())


@pytest.mark.parametrize("copied", [False, True], ids=["sharded", "copied"])
@pytest.mark.parametrize("family", [SD3, FLUX], ids=["sd3", "flux"])
def test_a_sharded_model_loads_no_ip_adapter(family, copied):
    model = apply(family.build(), group=Group())
    model = copy.deepcopy(model) if copied else model
    with pytest.raises(NotImplementedError, match="cannot have an IP-adapter loaded"):
        model._load_ip_adapter_weights({})
    assert type(family.build()._load_ip_adapter_weights).__name__ == "method"


# Perturbed-attention guidance works on the heads it is given; its batch holds the perturbed half (or third) as well.
GUIDED = {
    "sd3": (SD3, PAGJointAttnProcessor2_0, 2),
    "hunyuan_dit": (HUNYUAN, PAGHunyuanAttnProcessor2_0, 2),
    "hunyuan_dit_with_cfg": (HUNYUAN, PAGCFGHunyuanAttnProcessor2_0, 3),
}


def guided(group, case):
    """The output of a model whose self-attentions are perturbed: sharded over `group`, or whole without one."""
    family, processor, parts = GUIDED[case]
    model = family.build()
    for path, module in model.named_modules():
        if path.endswith((".attn", ".attn1")):
            module.set_processor(processor())
    if group is not None:
        apply(model, group=group)
    inputs = family.inputs().items()
    # Of the first image's inputs, a copy for every part of the batch.
    repeated = {
        key: torch.cat([value[:1]] * parts) if isinstance(value, torch.Tensor) else value for key, value in inputs
    }
    return run(model, repeated)


@pytest.mark.parametrize("case", GUIDED)
def test_perturbed_attention_is_right_on_a_sharded_model(ranks, case):
    wanted = guided(None, case)
    for got in ranks(2, guided, case):
        assert relative_error(got[0], wanted[0]) <= FLOAT32
    assert wanted[0].shape[0] == GUIDED[case][2] and not torch.equal(wanted[0][0], wanted[0][-1])
