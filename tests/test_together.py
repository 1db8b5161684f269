"""Projections of one input are one GEMM, in whatever order they are called, or compute by themselves."""

import gc
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from functions import Functions
from seeded import noise
from together_case import WIDTH, Model, Tensors, equals, shard, usual
from tp_layers.group import Group


def backwards(attn: Any, x: torch.Tensor) -> Tensors:
    return tuple(projection(x) for projection in (attn.to_v, attn.to_k, attn.to_q))


def across(attn: Any, x: torch.Tensor) -> Tensors:
    y = 2 * x
    return attn.to_q(x), attn.to_k(y), attn.to_v(y)


def changed_in_place(attn: Any, x: torch.Tensor) -> Tensors:
    x = x.clone()
    q = attn.to_q(x)
    x[1:] *= 3
    return q, attn.to_k(x), attn.to_v(x)


def queries_twice(attn: Any, x: torch.Tensor) -> Tensors:
    q = attn.to_q(x)
    first = q.clone()
    q *= 3
    return first, q, attn.to_q(x), attn.to_k(x), attn.to_v(x)


def keys_alone(attn: Any, x: torch.Tensor) -> Tensors:
    return (attn.to_k(x),)


def twice(attn: Any, x: torch.Tensor) -> Tensors:
    return usual(attn, x) + usual(attn, x + 1)


def halfway(attn: Any, x: torch.Tensor) -> Tensors:
    if attn.fails:
        attn.to_q(x)
        raise RuntimeError("between the projections")
    return usual(attn, x)


# What a call is, and how many GEMMs it takes.
ORDERS = {usual: 1, backwards: 1, across: 2, changed_in_place: 2, queries_twice: 2, keys_alone: 1, twice: 2}


def on_ranks(group: Group, order: Any, bias: bool) -> None:
    equals(shard(Model(order, bias), group), shard(Model(order, bias), group, fuse=False), ORDERS[order])


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_order_is_right_and_the_usual_one_is_one_gemm(ranks, size, order):
    ranks(size, on_ranks, order, True)


def test_without_biases(ranks):
    ranks(2, on_ranks, usual, False)


def test_keys_and_values_are_joined_where_queries_have_another_input():
    model = Model(across)
    model.attn.is_cross_attention = True
    shard(model)
    assert model.attn.to_q.together is None
    with torch.no_grad(), Functions() as functions:
        model(noise(5, WIDTH))
    assert functions.counts["linear"] == 2


def test_a_call_that_raises_leaves_nothing_behind():
    model = shard(Model(halfway))
    model.attn.fails = True
    with pytest.raises(RuntimeError, match="between the projections"), torch.no_grad():
        model(noise(5, WIDTH))
    model.attn.fails = False
    equals(model, Model(), 1)


def test_a_layer_called_by_itself_computes_by_itself():
    model = shard(Model())
    with torch.no_grad(), Functions() as functions:
        model.attn(noise(5, WIDTH))
    assert functions.counts["linear"] == 3


def test_no_tensor_outlives_the_call():
    model, x = shard(Model()), noise(5, WIDTH)

    def tensors() -> set[int]:
        gc.collect()
        return {id(thing) for thing in gc.get_objects() if isinstance(thing, torch.Tensor)}

    with torch.no_grad():
        model(x)
        before = tensors()
        out = model(x)
    # Those returned, and what they are views of.
    assert tensors() - before == {*map(id, out), id(out[0]._base)}


MODES = {
    "inference mode": (torch.inference_mode, 3),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), 3),
    "gradients": (nullcontext, 3),
}


@pytest.mark.parametrize(("mode", "gemms"), MODES.values(), ids=MODES)
def test_where_it_could_be_wrong_each_computes_by_itself(mode, gemms):
    equals(shard(Model()), Model(), gemms, mode())


def test_gradients_are_separate():
    found, wanted = shard(Model()), Model()
    for model in (found, wanted):
        sum(y.square().sum() for y in model(noise(5, WIDTH))).backward()
    for got, full in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(got.grad, full.grad)
    # Frozen parameters, and an input that needs none.
    equals(found.requires_grad_(False), wanted, 1, nullcontext())


class Some(dict[str, Any]):
    """Adapters that add nothing."""

    def __bool__(self) -> bool:
        return True


def test_a_layer_with_an_adapter_computes_by_itself():
    model = shard(Model())
    model.attn.to_v.adapters = Some()
    equals(model, Model(), 3)
    model.attn.to_v.adapters = {}
    equals(model, Model(), 1)
