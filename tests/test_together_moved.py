"""Projections that are computed together read their weights where they are, wherever they are moved."""

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from close import randomise
from seeded import noise
from together_case import INNER, WIDTH, Model, equals, shard, weights
from tp_layers.layers.together import are_adjacent


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
