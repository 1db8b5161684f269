"""The norms of queries and keys reduce their squares together; each by itself wherever that would not be right."""

import copy
import gc
import pickle

import pytest
import torch

import tp_layers
from calls import Calls
from close import FLOAT32, relative_error
from families import REGISTERED, run
from paired import (
    ORDERS,
    PLAN,
    another_tensor,
    build,
    changed_before,
    changed_in_place,
    halfway,
    inputs,
    keys_first,
    keys_not_normed,
    queries_twice,
    train,
    usual,
)
from tp_layers.describe import describe
from tp_layers.group import Group
from tp_layers.layers.pair import pair_norms
from tp_layers.plans.registry import plan_for

orders = pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)


def alone(model):
    """The same sharded model, each norm by itself."""
    for norm in (model.attn.norm_q, model.attn.norm_k):
        assert norm.together is not None and "together" in repr(norm)
        norm.together = None
    return model


def ways(group, order, change=lambda model: model):
    """The results of a pair and of norms by themselves, the whole model's output, and the collectives of a forward."""
    pair = change(tp_layers.apply(build(order), PLAN, group=group))
    single = alone(tp_layers.apply(build(order), PLAN, group=group))
    with torch.no_grad():
        wanted = build(order)(*inputs())
    kept = pair.attn.norm_q.together.__self__
    results = train(pair), train(single), wanted
    assert kept.key is None and kept.squares is None
    return *results, [*counted(pair), *counted(single)]


def counted(model):
    with Calls() as forward, torch.no_grad():
        model(*inputs())
    # The last one is the output's.
    return [len(forward.names) - 1]


@orders
def test_any_order_is_right_and_the_usual_one_is_one_all_reduce(ranks, order):
    for together, single, wanted, counts in ranks(2, ways, order):
        # Two addends have one sum.
        assert all(torch.equal(a, b) for a, b in zip(together, single, strict=True))
        assert relative_error(together[0], wanted) <= FLOAT32
        assert counts == [ORDERS[order], 1 if order is keys_not_normed else 3 if order is queries_twice else 2]


def test_on_four_ranks_it_is_the_same_but_for_the_order_of_summing(ranks):
    for together, single, wanted, counts in ranks(4, ways, usual):
        assert all(relative_error(a, b) <= FLOAT32 for a, b in zip(together, single, strict=True))
        assert relative_error(together[0], wanted) <= FLOAT32 and counts == [1, 2]


def copied(model):
    train(model)
    return pickle.loads(pickle.dumps(copy.deepcopy(model))) if model.attn.to_q.group.size == 1 else copy.deepcopy(model)


def test_a_copy_pairs_its_own_norms(ranks):
    for together, single, _, counts in ranks(2, ways, usual, copied):
        assert all(torch.equal(a, b) for a, b in zip(together, single, strict=True)) and counts == [1, 2]


def test_on_one_rank_there_is_no_pair(ranks):
    model = tp_layers.apply(build(usual), PLAN, group=Group())
    assert model.attn.norm_q.together is None and not model.attn._forward_hooks


def test_a_pair_can_be_pickled():
    model = tp_layers.apply(build(usual), PLAN, group=Group())
    pair_norms(model.attn)
    again = pickle.loads(pickle.dumps(model))
    assert again.attn.norm_k.together.__self__ is again.attn.norm_q.together.__self__
    assert again.attn.norm_k.together.__self__ is not model.attn.norm_k.together.__self__
    assert all(torch.equal(a, b) for a, b in zip(train(again), train(build(usual)), strict=True))


def compiled(model):
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    return model


def compiled_ways(group, order):
    model, eager = compiled(tp_layers.apply(build(order), PLAN, group=group)), build(order)
    tp_layers.apply(eager, PLAN, group=group)
    return train(model), train(eager)


@pytest.mark.parametrize("order", [usual, keys_first, another_tensor, changed_before], ids=lambda order: order.__name__)
def test_compiled_into_one_graph_it_is_the_same(ranks, order):
    for together, eager in ranks(2, compiled_ways, order):
        assert all(torch.equal(a, b) for a, b in zip(together, eager, strict=True))


def refused(group):
    with pytest.raises(Exception, match="changed in place between norm_q and norm_k"):
        train(compiled(tp_layers.apply(build(changed_in_place), PLAN, group=group)))


def test_keys_changed_between_the_norms_are_not_compiled(ranks):
    ranks(2, refused)


def failing(group):
    """What is kept after a call that raises, and the results of the next."""
    model, single = (tp_layers.apply(build(order), PLAN, group=group) for order in (halfway, usual))
    model.attn.fails = True
    with pytest.raises(RuntimeError, match="between the norms"):
        train(model)
    model.attn.fails = False
    kept = model.attn.norm_q.together.__self__
    return kept.key is None and kept.squares is None, train(model), train(single)


def test_a_call_that_raises_leaves_nothing_behind(ranks):
    for nothing, found, wanted in ranks(2, failing):
        assert nothing and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def without_gradients(group, mode):
    """With keys that are changed between the norms: the error, and how many all-reduces of squares there are."""
    model = tp_layers.apply(build(changed_in_place), PLAN, group=group, check_inputs=False)
    x, y = inputs()
    with torch.no_grad():
        wanted = build(changed_in_place)(x, y)
    with mode(), Calls() as calls:
        found = model(x, y)
    return relative_error(found.clone(), wanted), len(calls.names) - 1


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_keys_changed_between_the_norms_are_normed_by_themselves(ranks, mode):
    # Also where changes are not counted: in inference mode no norm relies on them.
    for error, count in ranks(2, without_gradients, mode):
        assert error <= FLOAT32 and count == 2


def with_gradients(group):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        train(tp_layers.apply(build(changed_in_place), PLAN, group=group))


def test_torch_refuses_the_gradient_of_keys_changed_between_the_norms(ranks):
    ranks(2, with_gradients)


def alive(group):
    """The tensors that are alive after a call and were not before it."""
    model = tp_layers.apply(build(usual), PLAN, group=group)
    x, y = inputs()

    def tensors():
        gc.collect()
        return {id(thing) for thing in gc.get_objects() if isinstance(thing, torch.Tensor)}

    with torch.no_grad():
        model(x, y)
        before = tensors()
        out = model(x, y)
    return len(tensors() - before - {id(out)})


def test_no_tensor_outlives_the_call(ranks):
    assert ranks(2, alive) == [0, 0]


def family_counts(group, label):
    model = REGISTERED[label].build()
    tp_layers.apply(model, plan_for(model, modulation="sharded"), group=group, check_inputs=False)
    with Calls() as calls:
        run(model, REGISTERED[label].inputs())
    return len(calls.names), sum(item.count for item in describe(model).collectives)


EVERY = (pytest.mark.slow, pytest.mark.families)
# Not those that call a layer twice (Helios its time projection), or that run flex attention, which Calls cannot enter.
ACROSS = [
    label
    for label, family in REGISTERED.items()
    if "rms_norm" in plan_for(family.make()).values()
    and family.model is None
    and not family.name.startswith(("Helios", "AnyFlowFAR"))
]


@pytest.mark.parametrize("label", [label if "LTXV" in label else pytest.param(label, marks=EVERY) for label in ACROSS])
def test_describe_counts_the_collectives_that_run(ranks, label):
    for ran, described in ranks(2, family_counts, label):
        assert ran == described


def test_ltx_has_half_as_many(ranks):
    model = REGISTERED["LTXVideoTransformer3DModel"].build()
    found = {item.kind: item for item in describe(model, size=2).collectives}
    # Of two attentions in each of two blocks: two float32 a row.
    assert (found["all-reduce of squares"].count, found["all-reduce of squares"].bytes_per_row) == (4, 4 * 8)
