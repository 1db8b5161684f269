"""Which way a sum over ranks takes, by a filled table and faked sums: windows, and what does not fit."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fake_ways import WINDOWS, FakeWays, reduced, table
from seeded import per_rank
from tp_layers import RowwiseLinear, graphs, ways
from tp_layers.collectives import all_reduce
from tp_layers.group import Group
from tp_layers.under_way import start_all_reduce

# Bytes of a float32 message, and its way.
EDGES = {
    0: None,
    60: "own",
    64: "one_shot",
    512: "one_shot",
    # Between two windows.
    516: "own",
    528: "two_shot",
    1024: "two_shot",
    1040: "own",
    2032: "own",
    2048: "multimem",
    2064: "own",
    # NCCL's own, wherever the tensor is.
    4096: "own",
    8208: "own",
    # In a window, but not of whole vectors.
    68: "own",
}


def test_windows_hold_their_first_and_last_size_and_nothing_more(ranks):
    wanted = [way for way in EDGES.values() if way is not None]
    lengths = [nbytes // 4 for nbytes in EDGES]
    assert ranks(2, reduced, torch.float32, lengths, table(2)) == [wanted] * 2


OTHERS = {
    "another dtype": (torch.bfloat16, table(2)),
    "another number of ranks": (torch.float32, table(4)),
    "another GPU": (torch.float32, {("another", 2, "float32"): WINDOWS}),
    "a dtype without a kernel": (torch.float16, table(2, dtype="float16")),
    "an integer": (torch.int32, table(2, dtype="int32")),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_not_in_the_table_or_has_no_kernel_takes_the_groups_own(ranks, case):
    dtype, of = OTHERS[case]
    assert ranks(2, reduced, dtype, [64, 128], of) == [["own", "own"]] * 2


def test_bfloat16_has_windows_of_its_own(ranks):
    of = table(3) | table(3, [(64, 128, "multimem")], "bfloat16")
    assert ranks(3, reduced, torch.bfloat16, [32, 64, 72], of) == [["multimem", "multimem", "own"]] * 3


def unaligned(group: Group) -> tuple[list[str], bool]:
    """A tensor whose address is odd on one rank alone."""
    terms = per_rank((32,), group.size, 1)
    memory = torch.full((40,), -1.0)
    x = memory[group.rank : group.rank + 32]
    x.copy_(terms[group.rank])
    with FakeWays(table(group.size)) as fake:
        all_reduce(x, group)
    outside = torch.cat([memory[: group.rank], memory[group.rank + 32 :]])
    return fake.calls, torch.equal(x, sum(terms)) and bool((outside == -1).all())


def test_an_address_that_does_not_fit_changes_no_ranks_way(ranks):
    assert ranks(2, unaligned) == [(["one_shot"], True)] * 2


def excluded(group: Group) -> dict[str, list[str]]:
    """The ways of sums that only the group's own may take."""
    x, found = torch.ones(4, 8), {}

    def strided() -> None:
        with pytest.raises(ValueError, match="with strides"):
            all_reduce(torch.ones(8, 8)[:, :4], group)

    def compiled() -> None:
        step = torch.compile(lambda x: all_reduce(x * 2, group), fullgraph=True, backend="aot_eager")
        assert torch.equal(step(x), torch.full((4, 8), 2.0 * group.size))

    def captured() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs, "is_captured", lambda: True)
            all_reduce(x.clone(), group)

    def differentiated() -> None:
        y = all_reduce(x.clone().requires_grad_() * 1, group)
        assert torch.equal(y, torch.full((4, 8), float(group.size)))

    todo: dict[str, Callable[[], Any]] = {
        "strided": strided,
        "in rank order": lambda: all_reduce(x.clone(), replace(group, deterministic=True)),
        "started": lambda: start_all_reduce(x.clone(), group)(),
        "differentiated": differentiated,
        "captured": captured,
        "compiled": compiled,
        "none of these": lambda: all_reduce(x.clone(), group),
    }
    for name, run in todo.items():
        with FakeWays(table(group.size)) as fake:
            run()
        found[name] = fake.calls
    return found


def test_what_only_the_groups_own_may_sum(ranks):
    for found in ranks(2, excluded):
        assert found.pop("none of these") == ["one_shot"]
        assert found.pop("in rank order") == [] and found.pop("strided") == []
        assert set(map(tuple, found.values())) <= {("own",), ()}, found


def unmeasured(group: Group) -> list[str]:
    """With the table as it is shipped nothing is asked of anybody, not even the name of the GPU."""
    with FakeWays({}) as fake, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ways, "machine", None)
        patch.setattr(dist, "all_gather_object", None)
        all_reduce(torch.ones(16), group)
        layer = RowwiseLinear.from_linear(nn.Linear(8, 16), group=group)
        with torch.no_grad():
            layer(torch.ones(4, layer.in_features))
        return fake.calls


def test_without_measurements_nothing_is_other_than_it_was(ranks):
    assert ranks(2, unmeasured) == [["own"] * 2] * 2
