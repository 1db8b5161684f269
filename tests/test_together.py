"""Projections of one input are one GEMM, in whatever order they are called and wherever their parameters are moved."""

import copy
import gc
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import tp_layers
from close import randomise
from functions import Functions
from seeded import noise
from tp_layers.group import Group
from tp_layers.layers.together import Together, are_adjacent

WIDTH, INNER = 8, 12
PLAN = {"attn.to_q": "colwise", "attn.to_k": "colwise", "attn.to_v": "colwise"}
Tensors = tuple[torch.Tensor, ...]


def usual(attn: Any, x: torch.Tensor) -> Tensors:
    return attn.to_q(x), attn.to_k(x), attn.to_v(x)


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


class Attention(nn.Module):
    is_cross_attention = False

    def __init__(self, order: Callable[[Any, torch.Tensor], Tensors], bias: bool) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, INNER * (n + 1), bias) for n in range(3))
        self.order, self.fails = order, False

    def forward(self, x: torch.Tensor) -> Tensors:
        return self.order(self, x)


class Model(nn.Module):
    def __init__(self, order: Callable[[Any, torch.Tensor], Tensors] = usual, bias: bool = True) -> None:
        super().__init__()
        self.attn = Attention(order, bias)
        randomise(self)

    def forward(self, x: torch.Tensor) -> Tensors:
        return self.attn(x)


def shard(model: nn.Module, group: Group = Group(), fuse: bool = True) -> Any:  # noqa: B008 (frozen)
    return tp_layers.apply(model, PLAN, group=group, check=False, fuse=fuse)


def weights(model: Any) -> list[torch.Tensor]:
    return [getattr(model.attn, name).weight for name in ("to_q", "to_k", "to_v")]


def equals(model: Any, single: Any, gemms: int, mode: Any = None) -> None:
    """The joined model gives what the same weights give by themselves, with so many GEMMs."""
    with mode or torch.no_grad():
        x = noise(5, WIDTH, dtype=weights(single)[0].dtype)
        wanted = single(x)
        with Functions() as functions:
            found = model(x)
    assert len(found) == len(wanted)
    for got, full in zip(found, wanted, strict=True):
        assert got.dtype == full.dtype
        torch.testing.assert_close(got, full)
    assert functions.counts["linear"] == gemms
    together: Together = model.attn.to_q.together
    assert together.x is None and not together.outputs and not together.call.open


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


def other_weights() -> dict[str, torch.Tensor]:
    return {name: value + 1 for name, value in Model().state_dict().items()}


def assigned(model: Any) -> None:
    model.load_state_dict(other_weights(), assign=True)


def one_assigned(model: Any) -> None:
    model.load_state_dict({"attn.to_k.weight": other_weights()["attn.to_k.weight"]}, assign=True, strict=False)


def copied_into(model: Any) -> None:
    model.load_state_dict(other_weights())


def data_set(model: Any) -> None:
    model.attn.to_k.weight.data = model.attn.to_k.weight.data + 1


def new_parameter(model: Any) -> None:
    model.attn.to_v.weight = nn.Parameter(model.attn.to_v.weight.detach() + 1)


def changed(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)


def in_one_vector(model: Any) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(model.parameters()) + 1, model.parameters())


def tied(model: Any) -> None:
    model.attn.to_v = copy.deepcopy(model.attn.to_q)
    model.attn.to_v.weight = model.attn.to_q.weight


def transposed(model: Any) -> None:
    model.attn.to_k.weight.data = model.attn.to_k.weight.data.t().contiguous().t()


# What is done to a model that was called, and how many GEMMs it takes then.
MOVES = {
    "cast": (lambda model: model.to(torch.float64), 1),
    "cast and back": (lambda model: model.to(torch.float64).to(torch.float32), 1),
    "cloned": (lambda model: model._apply(torch.clone), 1),
    "shared": (lambda model: model.share_memory(), 1),
    "one cast": (lambda model: model.attn.to_k.to(torch.float64).to(torch.float32), 3),
    "all assigned": (assigned, 1),
    "one assigned": (one_assigned, 3),
    "copied into": (copied_into, 1),
    "data set": (data_set, 3),
    "a new parameter": (new_parameter, 3),
    "changed in place": (changed, 1),
    "parts of one vector": (in_one_vector, 3),
    "transposed": (transposed, 3),
}


@pytest.mark.parametrize(("move", "gemms"), MOVES.values(), ids=MOVES)
def test_moved_parameters_are_joined_again_or_read_where_they_are(move, gemms):
    model, single = shard(Model()), shard(Model(), fuse=False)
    equals(model, single, 1)
    for each in (model, single):
        move(each)
    keys, before = list(model.state_dict()), [weight.detach().clone() for weight in weights(model)]
    equals(model, single, gemms)
    equals(model, single, gemms)
    assert are_adjacent(weights(model)) == (gemms == 1)
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(weights(model), before, strict=True))


def test_weights_that_are_computed_are_read_as_they_are():
    model, single = shard(Model()), shard(Model(), fuse=False)
    for each in (model, single):
        nn.utils.parametrizations.weight_norm(each.attn.to_k, "weight")
        with torch.no_grad():
            each.attn.to_k.parametrizations.weight.original0.mul_(2)
    equals(model, single, 3)
    for each in (model, single):
        prune.l1_unstructured(each.attn.to_v, "weight", 0.5)
    equals(model, single, 3)


def test_tensors_that_stand_in_for_parameters_are_read():
    model, single, x = shard(Model()), shard(Model(), fuse=False), noise(5, WIDTH)
    # Two models' weights at once.
    stacked = {name: torch.stack([value, 2 * value]) for name, value in model.state_dict().items()}

    def outputs(each: Any) -> Any:
        return torch.vmap(lambda state: torch.func.functional_call(each, state, (x,)))(stacked)

    with torch.no_grad():
        for got, wanted in zip(outputs(model), outputs(single), strict=True):
            torch.testing.assert_close(got, wanted)
        frozen = model.requires_grad_(False)
        gradient = torch.func.grad(lambda y: sum(it.square().sum() for it in frozen(y)))(x)
        expected = torch.func.grad(lambda y: sum(it.square().sum() for it in single(y)))(x)
    torch.testing.assert_close(gradient, expected)
    equals(model, single, 1)


def test_parameters_are_views_of_one_buffer_from_the_beginning():
    model = shard(Model())
    assert are_adjacent(weights(model)) and not are_adjacent(weights(shard(Model(), fuse=False)))
    storage = weights(model)[0].untyped_storage()
    assert storage.nbytes() == sum(weight.nbytes for weight in weights(model))
    assert [tuple(weight.shape) for weight in weights(model)] == [(12, 8), (24, 8), (36, 8)]


def test_neighbours_in_memory_are_not_one_buffer():
    both = torch.zeros(4, 2)
    first, second = (torch.frombuffer(memoryview(both.numpy())[at : at + 2], dtype=torch.float32) for at in (0, 2))
    assert first.data_ptr() + first.nbytes == second.data_ptr()
    assert not are_adjacent([first, second]) and are_adjacent(both.split(2))


def twin(model: Any) -> Any:
    return copy.deepcopy(model)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def saved(model: Any) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


# A pickle has a buffer for each view.
@pytest.mark.parametrize(("how", "gemms"), [(twin, 1), (saved, 1), (pickled, 3)])
def test_a_copy_has_weights_of_its_own(how, gemms):
    model = shard(Model())
    equals(model, Model(), 1)
    again = how(model)
    assert again.attn.to_q.together.layers[1] is again.attn.to_k
    changed(model)
    equals(again, Model(), gemms)
    single = shard(Model(), fuse=False)
    changed(single)
    equals(model, single, 1)
    assert are_adjacent(weights(again)) == (gemms == 1) and weights(again)[0].data_ptr() != weights(model)[0].data_ptr()


@pytest.mark.parametrize("layer", ["plain", "tied"])
def test_a_projection_that_was_replaced_is_the_one_that_is_read(layer):
    model, single = shard(Model()), shard(Model(), fuse=False)
    for each in (model, single):
        if layer == "tied":
            tied(each)
        else:
            each.attn.to_v = randomise(nn.Linear(WIDTH, INNER), seed=3)
    x = noise(5, WIDTH)
    with torch.no_grad():
        for _ in range(2):
            for got, wanted in zip(model(x), single(x), strict=True):
                torch.testing.assert_close(got, wanted)
