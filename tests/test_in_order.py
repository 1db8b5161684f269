"""`deterministic=True`: the bits of a sum over ranks follow from its terms alone."""

from functools import reduce
from typing import Any

import pytest
import torch

import tp_layers
from calls import Calls
from close import FLOAT32, compare, relative_error
from families import REGISTERED, digest, run
from seeded import noise
from tp_layers.collectives import all_reduce
from tp_layers.group import Group
from tp_layers.in_order import sum_in_order


def term(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    # Of unlike sizes, so that the order of the sum shows in its bits.
    return (noise(*shape, seed=rank) * 10.0 ** (rank % 3)).to(dtype)


def sums(group: Group, dtype: torch.dtype) -> list[bool]:
    """Whether sums of several lengths are those in rank order, in place, and the same in a shorter message."""
    found = []
    for length in (1, 5, 64, 1000):
        terms, half = [term(rank, dtype, length) for rank in range(group.size)], length // 2 + 1
        wanted = reduce(torch.add, [part.float() for part in terms]).to(dtype)
        x, short = terms[group.rank].clone(), terms[group.rank][:half].clone()
        found += [
            sum_in_order(x, group) is x,
            torch.equal(x, wanted),
            torch.equal(sum_in_order(short, group), x[:half]),
        ]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_taken_in_rank_order(ranks, size, dtype):
    for found in ranks(size, sums, dtype):
        assert all(found)


def kinds(group: Group) -> list[bool]:
    whole, empty = torch.full((2, 3), group.rank + 1), torch.zeros(0, 4)
    wide = term(group.rank, torch.float64, 7)
    wanted = sum(term(rank, torch.float64, 7) for rank in range(group.size))
    ordered = Group(group.rank, group.size, group.device, group.process_group, deterministic=True)
    return [
        torch.equal(sum_in_order(whole.clone(), group), torch.full((2, 3), 6)),
        all_reduce(empty, ordered) is empty,
        torch.equal(sum_in_order(wide, group), wanted),
    ]


def test_integers_doubles_and_empty_tensors(ranks):
    assert ranks(3, kinds) == [[True] * 3] * 3


def model_outputs(group: Group, label: str, how: dict[str, Any]) -> tuple[list[torch.Tensor], int, set[str]]:
    family = REGISTERED[label]
    model = tp_layers.apply(family.build(), group=group, check_inputs=False, **how)
    with Calls() as calls:
        found = run(model, family.inputs())
    return found, digest(found), set(calls.names)


LABELS = ["Flux2Transformer2DModel", "LTXVideoTransformer3DModel"]
HOW = {"alone": {}, "in float32": dict(reduce_dtype=torch.float32), "uneven": dict(uneven=True)}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
@pytest.mark.parametrize("label", LABELS)
def test_every_sum_of_a_model_is_in_order(ranks, label, how):
    family = REGISTERED[label]
    results = ranks(4, model_outputs, label, {**how, "deterministic": True})
    assert compare([(found, bits) for found, bits, _ in results], run(family.build(), family.inputs())) <= FLOAT32
    for _, _, names in results:
        assert not any("allreduce" in name or "all_reduce" in name for name in names)
        assert any("alltoall" in name for name in names)


def gradients(group: Group, deterministic: bool) -> dict[str, torch.Tensor]:
    family = REGISTERED["Flux2Transformer2DModel"]
    model = tp_layers.apply(family.build(), group=group, deterministic=deterministic)
    model(**family.inputs(), return_dict=False)[0].square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_gradients_are_the_same_but_for_rounding(ranks):
    for ordered, plain in zip(ranks(2, gradients, True), ranks(2, gradients, False), strict=True):
        assert ordered.keys() == plain.keys()
        assert max(relative_error(ordered[name], plain[name]) for name in plain) < 1e-5


def differently(group: Group) -> str:
    """The error where ranks ask for unlike sums."""
    family = REGISTERED["Flux2Transformer2DModel"]
    try:
        tp_layers.apply(family.build(), group=group, deterministic=group.rank == 0)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_must_want_the_same(ranks):
    for message in ranks(2, differently):
        assert "has another model, checkpoint, plan or size" in message
