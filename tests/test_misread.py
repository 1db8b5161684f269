"""A norm over all heads, and an activation that splits its input, are not left to each rank's part of a tensor."""

import re

import pytest
import torch
from diffusers.models.activations import GEGLU, SwiGLU
from diffusers.models.attention import FeedForward
from diffusers.models.attention_processor import Attention
from diffusers.models.normalization import RMSNorm
from torch import nn

import tp_layers
from families import REGISTERED
from text_models import TEXT_MODELS
from tp_layers import Divide, PackedColwiseParallel
from tp_layers.plans.registry import plan_for
from tp_layers.plans.resolve import resolve

ATTENTION = {
    "attn": Divide("heads"), "attn.to_q": "colwise", "attn.to_k": "colwise", "attn.to_v": "colwise",
    "attn.to_out.0": "rowwise",
}  # fmt: skip
MLP = {"ff.net.0.proj": "colwise", "ff.net.2": "rowwise"}


class Block(nn.Module):
    """Attention over four heads of 6 channels (two of keys, unless all are as many), and an MLP."""

    def __init__(self, qk_norm: str | None = None, kv_heads: int = 2, activation: str = "gelu") -> None:
        super().__init__()
        self.attn = Attention(24, heads=4, kv_heads=kv_heads, dim_head=6, qk_norm=qk_norm)
        self.ff = FeedForward(24, activation_fn=activation)


@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("kind", ["layer_norm_across_heads", "rms_norm_across_heads"])
def test_a_norm_over_all_heads_that_the_plan_leaves_out_is_refused(kind, kv_heads):
    model = Block(kind, kv_heads)
    with pytest.raises(ValueError, match=r"'attn\.norm_q', a \w+Norm over all 24 channels"):
        resolve(model, ATTENTION, 2)
    # Of keys alone, which have fewer channels in one of the models.
    plan = {**ATTENTION, "attn.norm_q": "replicate"}
    with pytest.raises(ValueError, match=rf"'attn.norm_k', a \w+Norm over all {kv_heads * 6} channels"):
        resolve(model, plan, 2)
    assert "attn.norm_k" in resolve(model, plan, 2, check=False).notes[0]


def test_a_norm_without_a_weight_is_seen_too():
    # It would raise nothing: neither a weight nor a shape that does not fit.
    model = Block()
    model.attn.norm_k = RMSNorm(12, eps=1e-6, elementwise_affine=False)
    with pytest.raises(ValueError, match=r"'attn\.norm_k', a RMSNorm over all 12 channels"):
        resolve(model, ATTENTION, 2)


@pytest.mark.parametrize("kind", [None, "layer_norm", "rms_norm", "l2"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_norm_within_a_head_may_be_left_out(kind, kv_heads):
    # One kv head is as wide as what a norm within a head takes.
    assert resolve(Block(kind, kv_heads), ATTENTION, 2).notes == []


def test_a_norm_over_all_heads_that_the_plan_names_is_as_it_says():
    model = Block("rms_norm_across_heads")
    assert resolve(model, {**ATTENTION, "attn.norm_q": "rms_norm", "attn.norm_k": "rms_norm"}, 2).notes == []


@pytest.mark.parametrize(("activation", "kind"), [("geglu", GEGLU), ("swiglu", SwiGLU)])
def test_the_two_halves_of_a_gated_activation_are_not_cut_as_one(activation, kind):
    model = Block(activation=activation)
    assert isinstance(model.ff.net[0], kind)
    with pytest.raises(ValueError, match=re.escape(f"both halves of a {kind.__name__}")) as error:
        resolve(model, MLP, 2)
    assert "PackedColwiseParallel([1, 1])" in str(error.value)
    assert "'ff.net.0.proj'" in str(tp_layers.describe(model, MLP, size=2, check=False))
    for blocks in ([1, 1], lambda linear: [linear.out_features // 2] * 2):
        assert resolve(model, {**MLP, "ff.net.0.proj": PackedColwiseParallel(blocks)}, 2).notes == []


@pytest.mark.parametrize("activation", ["gelu", "gelu-approximate", "linear-silu"])
def test_other_activations_may_be_cut_as_one(activation):
    assert resolve(Block(activation=activation), MLP, 2).notes == []


@pytest.mark.parametrize("label", REGISTERED)
def test_no_registered_plan_is_refused_for_that(label):
    with torch.device("meta"):
        model = REGISTERED[label].make()
    assert resolve(model, plan_for(model), 2).size == 2


@pytest.mark.parametrize("label", TEXT_MODELS)
def test_no_plan_of_a_text_model_is_refused_for_that(label):
    assert resolve(TEXT_MODELS[label].build(), TEXT_MODELS[label].plan, 2).size == 2
