"""The first forward compares the ranks' inputs, names what differs, and is the only one that does."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import tp_layers
from calls import Calls
from close import nearly, randomise
from families import FAMILIES
from pair import PLAN, Pair
from seeded import integers
from tp_layers.group import Group
from tp_layers.inputs import require_same

FLUX = FAMILIES["FluxTransformer2DModel"]
BASE = torch.linspace(-1, 1, 4096).view(64, 64)


def changed(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    x[-1, -1] = value
    return x


@dataclass
class Both:
    first: torch.Tensor
    second: int


# A value for rank 0, and another one for the others.
DIFFER: dict[str, tuple[Any, Any]] = {
    "the last element": (BASE, changed(BASE, 0.5)),
    "two elements swapped": (torch.tensor([1.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0])),
    "the sign of a zero": (torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0])),
    "strides alone, which swaps values": (BASE[:2, :2], BASE[:2, :2].t()),
    "a shape": (torch.zeros(2, 3), torch.zeros(3, 2)),
    "a dtype": (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
    "a boolean mask": (torch.tensor([True, False]), torch.tensor([True, True])),
    "a complex number": (torch.tensor([1j, 2j]), torch.tensor([1j, 2.5j])),
    "a number": (3.5, 3.25),
    "a text": ("a cat", "a dog"),
    "nothing": (None, torch.zeros(1)),
    "a tensor in a list": ([BASE, 1], [BASE + 1, 1]),
    "a tensor in a dict": ({"scale": torch.ones(1)}, {"scale": torch.zeros(1)}),
    "a key": ({"scale": 1}, {"scales": 1}),
    "a field": (Both(torch.ones(1), 1), Both(torch.ones(1), 2)),
    "the length of a list": ([1], [1, 1]),
    "where a list ends": ([[1], [2]], [[1, 2], []]),
}


def compared(group: Group, name: str) -> str:
    value = DIFFER[name][min(group.rank, 1)]
    try:
        require_same({"same": BASE, "other": value}, group)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", DIFFER)
def test_what_differs_is_named_on_every_rank(ranks, name):
    for message in ranks(3, compared, name):
        assert message.startswith("rank 1 of 3 was given another 'other' than rank 0: seed generators alike")


def equal_values(group: Group) -> list[str]:
    """What is equal, however it lies in memory, or cannot be compared, is not refused."""
    nan, spread = torch.tensor([float("nan"), 1.0]), torch.zeros(64, 128)
    spread[:, ::2] = BASE
    mine = BASE if group.rank else spread[:, ::2]
    given = {
        "strided": mine,
        "expanded": torch.ones(1).expand(1) if group.rank else torch.ones(1),
        "empty": torch.zeros(0, 3),
        "a lone number": torch.tensor(3),
        "nan": nan,
        "half": BASE.bfloat16(),
        "an object": object(),
        "a generator": torch.Generator().manual_seed(group.rank),
    }
    try:
        require_same(given, group)
    except ValueError as error:
        return [str(error)]
    return []


def test_equal_inputs_are_accepted(ranks):
    assert ranks(2, equal_values) == [[], []]


def noise_of(group: Group, check_inputs: bool) -> tuple[str, list[torch.Tensor]]:
    """The error of a forward whose noise is not seeded alike, tried twice, or its output."""
    model = tp_layers.apply(FLUX.build(), group=group, check_inputs=check_inputs)
    if check_inputs:
        with pytest.raises(ValueError, match="another 'hidden_states'"):
            model(**{**FLUX.inputs(), "hidden_states": torch.full((2, 6, 8), float(group.rank))})
    inputs = FLUX.inputs()
    inputs["hidden_states"] = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(group.rank))
    try:
        with torch.no_grad():
            return "", [model(**inputs, return_dict=False)[0]]
    except ValueError as error:
        return str(error), []


def test_noise_that_is_not_seeded_alike_is_refused_unless_that_is_turned_off(ranks):
    for message, _ in ranks(2, noise_of, True):
        assert "rank 1 of 2 was given another 'hidden_states' than rank 0" in message
    assert [(message, len(outputs)) for message, outputs in ranks(2, noise_of, False)] == [("", 1), ("", 1)]


def collectives(group: Group) -> dict[str, list[int]]:
    """How many collectives each of three forwards makes; of a copy, and of a model that is not checked, too."""
    x = integers(3, 8, seed=1)
    model = tp_layers.apply(randomise(Pair()), PLAN, group=group)
    models = {
        "positional": model,
        "a copy": copy.deepcopy(model),
        "not checked": tp_layers.apply(randomise(Pair()), PLAN, group=group, check_inputs=False),
    }
    counts: dict[str, list[int]] = {}
    for name, its in models.items():
        for _ in range(3):
            with torch.no_grad(), Calls() as calls:
                its(x)
            counts.setdefault(name, []).append(len(calls.names))
    return counts


def test_it_costs_one_collective_once(ranks):
    assert ranks(2, collectives) == [{"positional": [2, 1, 1], "a copy": [2, 1, 1], "not checked": [1, 1, 1]}] * 2
    assert ranks(1, collectives) == [{"positional": [0] * 3, "a copy": [0] * 3, "not checked": [0] * 3}]


def compiled(group: Group) -> list[bool]:
    """A model compiled as a whole computes what it should, without a break in its graph, and does not compare."""
    model, x = randomise(Pair()), integers(3, 8, seed=1)
    with torch.no_grad():
        wanted = model(x)
        model = tp_layers.apply(model, PLAN, group=group)
        model.compile(fullgraph=True, backend="aot_eager")
        return [nearly(model(x), wanted) for _ in range(2)]


def test_a_compiled_model_runs(ranks):
    assert ranks(2, compiled) == [[True, True]] * 2


class Named(Pair):
    """A forward that takes anything."""

    def forward(self, x: torch.Tensor, *more: Any, **others: Any) -> torch.Tensor:
        return super().forward(x)


def names_of_arguments(group: Group, how: str) -> str:
    model = tp_layers.apply(randomise(Named()), PLAN, group=group)
    x, other = integers(3, 8, seed=1), float(group.rank)
    try:
        if how == "more":
            model(x, other)
        elif how == "others":
            model(x, scale=other)
        else:
            model(x + group.rank)
    except ValueError as error:
        return str(error).split("'")[1]
    return ""


@pytest.mark.parametrize("how", ["x", "more", "others"])
def test_arguments_have_the_names_of_the_forward(ranks, how):
    assert ranks(2, names_of_arguments, how) == [how] * 2


def test_a_call_that_does_not_fit_is_told_by_the_forward(ranks):
    for message in ranks(2, misfit):
        assert "missing 1 required positional argument" in message or "takes" in message


def misfit(group: Group) -> str:
    model: nn.Module = tp_layers.apply(randomise(Pair()), PLAN, group=group)
    try:
        model(1, 2, 3)
    except TypeError as error:
        return str(error)
    return ""
