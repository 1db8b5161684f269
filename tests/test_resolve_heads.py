"""Where heads are split, their counts must be divisible, whoever holds them; elsewhere they do not matter."""

from types import SimpleNamespace

import pytest
import torch
from diffusers import FluxTransformer2DModel, Lumina2Transformer2DModel
from torch import nn

from refused import refused
from tp_layers import apply
from tp_layers.group import Group
from tp_layers.plans.resolve import resolve
from tp_layers.plans.shared import feed_forward, self_attention


class Attention(nn.Module):
    """Projections of heads, with or without counts of its own."""

    def __init__(self, **counts):
        super().__init__()
        self.to_q, self.to_k, self.to_out = nn.Linear(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        for name, value in counts.items():
            setattr(self, name, value)


class HeadModel(nn.Module):
    def __init__(self, config=None, own_config=None, **counts):
        super().__init__()
        self.attn = Attention(**counts)
        self.up, self.down = nn.Linear(24, 24), nn.Linear(24, 24)
        self.config = config
        if own_config is not None:
            self.attn.config = own_config


ATTENTION = {"attn.to_q": "colwise", "attn.to_k": "colwise", "attn.to_out": "rowwise"}
FFN = {"up": "colwise", "down": "rowwise"}
HEADS = {
    "heads_of_the_module": (
        {"heads": 3},
        None,
        2,
        ["'attn': heads of 3 is not divisible by 2 ranks", "sizes that work for this plan: 1, 3"],
    ),
    "num_heads": ({"num_heads": 3}, None, 2, ["'attn': num_heads of 3"]),
    "n_heads": ({"n_heads": 3}, None, 2, ["'attn': n_heads of 3"]),
    "num_attention_heads": ({"num_attention_heads": 3}, None, 2, ["'attn': num_attention_heads of 3"]),
    "kv_heads_of_the_module": ({"heads": 6, "kv_heads": 1}, None, 2, ["'attn': kv_heads of 1"]),
    "fewer_kv_heads_than_ranks": (
        {"num_heads": 8, "num_key_value_heads": 2},
        None,
        4,
        ["'attn': num_key_value_heads of 2 is not divisible by 4 ranks", "work for this plan: 1, 2"],
    ),
    "kv_heads_by_their_width": (
        {"heads": 12, "inner_dim": 24, "inner_kv_dim": 4},
        None,
        4,
        ["'attn': kv_heads of 2 is not divisible by 4 ranks", "work for this plan: 1, 2"],
    ),
    "heads_of_the_config": ({}, {"num_attention_heads": 3}, 2, ["the model's num_attention_heads of 3"]),
    "kv_heads_of_the_config": (
        {},
        {"num_attention_heads": 8, "num_key_value_heads": 2},
        4,
        ["the model's num_key_value_heads of 2 is not divisible by 4 ranks"],
    ),
}


@pytest.mark.parametrize(("counts", "config", "size", "message"), HEADS.values(), ids=HEADS)
def test_heads_that_do_not_divide_are_refused_where_the_width_does(counts, config, size, message):
    model = HeadModel(config and SimpleNamespace(**config), **counts)
    with refused(model, *message):
        apply(model, {**ATTENTION, **FFN}, group=Group(0, size))


@pytest.mark.parametrize(("counts", "config", "size", "message"), HEADS.values(), ids=HEADS)
def test_a_plan_of_the_feed_forward_alone_is_not_refused_because_of_heads(counts, config, size, message):
    model = HeadModel(config and SimpleNamespace(**config), **counts)
    resolved = resolve(model, FFN, size)
    assert set(resolved.specs) == {"up.weight", "up.bias", "down.weight"}
    assert resolved.sizes == [1, 2, 3, 4, 6, 8, 12, 24]


def test_heads_do_not_matter_where_none_are_split():
    assert resolve(HeadModel(heads=3), {"attn.to_out": "rowwise_split_input"}, 2).sizes == [1, 2, 3, 4, 6, 8, 12, 24]


def test_the_modules_own_count_stands_before_the_configs():
    """One stack of a model may have other heads than its config says."""
    model = HeadModel(SimpleNamespace(num_attention_heads=3), heads=4)
    assert resolve(model, ATTENTION, 2).sizes == [1, 2, 4]
    model = HeadModel(SimpleNamespace(num_attention_heads=3), own_config=SimpleNamespace(num_attention_heads=4))
    assert resolve(model, ATTENTION, 2).sizes == [1, 2, 4]


def test_heads_of_models_of_diffusers():
    with torch.device("meta"):
        flux = FluxTransformer2DModel(num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=3)
        lumina = Lumina2Transformer2DModel(
            hidden_size=32, num_layers=1, num_refiner_layers=1, num_attention_heads=4, num_kv_heads=2
        )
    with pytest.raises(ValueError, match="heads of 3 is not divisible by 2 ranks; sizes that work for this plan: 1, 3"):
        resolve(flux, self_attention("transformer_blocks.*.attn"), 2)
    assert resolve(flux, feed_forward("transformer_blocks.*.ff"), 2).notes == []
    # Two kv heads are divided by two ranks, and each is held by two of four.
    assert resolve(lumina, self_attention("layers.*.attn"), 2).sizes == [1, 2, 4]
    with pytest.raises(ValueError, match=r"heads of 4 is not divisible by 8 ranks; sizes that .*: 1, 2, 4$"):
        resolve(lumina, self_attention("layers.*.attn"), 8)
