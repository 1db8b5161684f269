"""Two rowwise layers, one all-reduce: the same bits as one each, in whatever order they are called."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from calls import Calls
from seeded import integers
from tp_layers import RowwiseLinear
from tp_layers.group import Group
from tp_layers.layers.low_rank import LowRank
from tp_layers.layers.options import Options
from tp_layers.layers.streams import Streams

WIDTH, OUT = 24, 7
Outputs = list[torch.Tensor]


def linear(seed: int, bias: bool = True) -> nn.Linear:
    made = nn.Linear(WIDTH, OUT, bias)
    with torch.no_grad():
        for number, parameter in enumerate(made.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=seed + number))
    return made


class Two:
    """Two layers, of text and image, with their inputs on this rank; `full` computes what they must give."""

    def __init__(self, group: Group, options: Options = Options(), bias: bool = True, rows: tuple[int, ...] = (3, 5)):  # noqa: B008 (frozen)
        fulls = [linear(seed, bias) for seed in (10, 20)]
        self.text, self.image = (RowwiseLinear.from_linear(full, group=group, options=options) for full in fulls)
        self.streams = Streams(self.text, self.image)
        wholes = [integers(2, count, WIDTH, seed=30 + number) for number, count in enumerate(rows)]
        self.a, self.b = (self.text.features.take(whole, group.rank, group.size) for whole in wholes)
        with torch.no_grad():
            self.wanted = [full(whole) for full, whole in zip(fulls, wholes, strict=True)]


def usual(two: Two) -> Outputs:
    two.streams.expect(two.image, two.b)
    return [two.text(two.a), two.image(two.b)]


def not_expected(two: Two) -> Outputs:
    return [two.text(two.a), two.image(two.b)]


def another_tensor(two: Two) -> Outputs:
    two.streams.expect(two.image, two.b)
    return [two.text(two.a), two.image(two.b.clone())]


def changed_after(two: Two) -> Outputs:
    other = 2 * two.b
    two.streams.expect(two.image, other)
    y = two.text(two.a)
    other.copy_(two.b)
    return [y, two.image(other)]


def changed_before(two: Two) -> Outputs:
    other = 2 * two.b
    two.streams.expect(two.image, other)
    other.copy_(two.b)
    return [two.text(two.a), two.image(other)]


def the_expected_alone(two: Two) -> Outputs:
    two.streams.expect(two.image, two.b)
    y = two.image(two.b)
    return [two.text(two.a), y]


def the_first_twice(two: Two) -> Outputs:
    two.streams.expect(two.image, two.b)
    first = two.text(two.a)
    first.zero_()
    return [two.text(two.a), two.image(two.b)]


def the_second_twice(two: Two) -> Outputs:
    two.streams.expect(two.image, two.b)
    y = two.text(two.a)
    two.image(two.b).zero_()
    return [y, two.image(two.b)]


def after_a_failure(two: Two) -> Outputs:
    two.streams.expect(two.image, 3 * two.b)
    two.text(3 * two.a)
    return usual(two)


# What a call is, and how many all-reduces it takes.
ORDERS: dict[Callable[[Two], Outputs], int] = {
    usual: 1,
    not_expected: 2,
    another_tensor: 2,
    changed_after: 2,
    changed_before: 2,
    the_expected_alone: 2,
    the_first_twice: 2,
    the_second_twice: 2,
    after_a_failure: 2,
}


def called(group: Group, order: Callable[[Two], Outputs], mode: Any = torch.no_grad, **how: Any) -> tuple[bool, int]:
    """Whether both outputs are those of the full layers, bit for bit, and how many all-reduces there were."""
    two = Two(group, **how)
    with mode(), Calls() as calls:
        found = order(two)
    streams = two.streams
    assert streams.y is None
    return all(torch.equal(y, full) for y, full in zip(found, two.wanted, strict=True)), len(calls.names)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("order", ORDERS, ids=[order.__name__ for order in ORDERS])
def test_two_streams_are_one_reduction_or_each_their_own(ranks, order, size):
    assert ranks(size, called, order) == [(True, ORDERS[order])] * size


def by_option(group: Group, how: dict[str, Any], deterministic: bool) -> tuple[bool, int]:
    return called(Group.of(group, deterministic), usual, **how)


HOW: dict[str, dict[str, Any]] = {
    "no bias": {"bias": False},
    "reduced in float64": {"options": Options(reduce_dtype=torch.float64)},
    "full weights in place": {"options": Options(copy=False)},
    "no text": {"rows": (0, 5)},
    "nothing": {"rows": (0, 0)},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_so_they_are_with_every_option(ranks, how):
    for same, count in ranks(2, by_option, how, False):
        assert same and count == (0 if how.get("rows") == (0, 0) else 1)


def test_sums_in_rank_order(ranks):
    assert all(same for same, _ in ranks(3, by_option, {}, True))


def made_within(two: Two) -> Outputs:
    two.a, two.b = two.a.clone(), two.b.clone()
    return usual(two)


def test_tensors_of_inference_mode_do_not_count_their_changes_and_each_has_its_own(ranks):
    assert ranks(2, called, made_within, torch.inference_mode) == [(True, 2)] * 2


def differentiated(group: Group) -> tuple[bool, int, bool]:
    two = Two(group)
    with Calls() as calls:
        found = usual(two)
    sum(y.sum() for y in found).backward()
    grads = [layer.weight.grad for layer in (two.text, two.image)]
    wanted = [x.sum((0, 1)).expand(OUT, -1) for x in (two.a, two.b)]
    same = all(torch.equal(y, full) for y, full in zip(found, two.wanted, strict=True))
    return same, len(calls.names), all(torch.equal(g, w) for g, w in zip(grads, wanted, strict=True))


def test_under_autograd_each_has_its_own_and_gradients_are_right(ranks):
    assert ranks(2, differentiated) == [(True, 2, True)] * 2


def adapted(group: Group) -> tuple[bool, int]:
    two = Two(group)
    low_rank = LowRank(integers(2, WIDTH, seed=50), integers(OUT, 2, seed=51), integers(OUT, seed=52), scaling=2.0)
    for layer in (two.text, two.image):
        layer.adapters["a"] = low_rank.shard(layer.spec, group)
    with torch.no_grad(), Calls() as calls:
        together = usual(two)
    with torch.no_grad():
        alone = not_expected(two)
    changed = not any(torch.equal(y, full) for y, full in zip(together, two.wanted, strict=True))
    return changed and all(torch.equal(y, full) for y, full in zip(together, alone, strict=True)), len(calls.names)


def test_adapters_are_part_of_the_sum(ranks):
    assert ranks(2, adapted) == [(True, 1)] * 2


def hooked(group: Group) -> tuple[bool, int]:
    """Hooks on rank 0 alone, which see each layer once, with its input and its whole output."""
    two, seen = Two(group), []
    if group.rank == 0:
        for layer in (two.text, two.image):
            layer.register_forward_hook(lambda _, args, y: seen.append((args[0], y.clone())))
    with torch.no_grad(), Calls() as calls:
        found = usual(two)
    if group.rank == 0:
        assert [x is mine for (x, _), mine in zip(seen, (two.a, two.b), strict=True)] == [True, True]
        assert all(torch.equal(y, full) for (_, y), full in zip(seen, two.wanted, strict=True))
    return all(torch.equal(y, full) for y, full in zip(found, two.wanted, strict=True)), len(calls.names)


def test_a_hook_on_one_rank_changes_nothing(ranks):
    assert ranks(2, hooked) == [(True, 1)] * 2
