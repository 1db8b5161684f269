"""Which way a sum over ranks takes, by a filled table and faked sums: windows, what does not fit, fallbacks."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fake_ways import GPU, FakeWays, allocate
from seeded import integers, per_rank
from tp_layers import RowwiseLinear, graphs, registered, symmetric, ways, windows
from tp_layers.collectives import all_reduce, start_all_reduce
from tp_layers.group import Group
from tp_layers.layers.options import Options
from tp_layers.layers.overlap import Overlap

WINDOWS = ((64, 512, "one_shot"), (528, 1024, "two_shot"), (2048, 2048, "multimem"), (4096, 8192, "registered"))


def table(size: int, found: Sequence[windows.Window] = WINDOWS, dtype: str = "float32") -> dict[Any, Any]:
    return {(GPU, size, dtype): tuple(found)}


def reduced(group: Group, dtype: torch.dtype, lengths: Sequence[int], of: dict[Any, Any]) -> list[str]:
    """The way of a sum of each length, which must be right and in place."""
    with FakeWays(of) as fake:
        for length in lengths:
            terms = per_rank((length,), group.size, length, dtype)
            x = terms[group.rank].clone()
            assert all_reduce(x, group) is x and torch.equal(x, sum(terms)), length
        return fake.calls


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


class Log(logging.Handler):
    """The lines that `ways` logs, for the time of the block."""

    def __enter__(self) -> "Log":
        self.lines: list[str] = []
        ways.logger.addHandler(self)
        return self

    def __exit__(self, *error: object) -> None:
        ways.logger.removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def failing(group: Group, what: str) -> tuple[list[str], list[str]]:
    """The ways of three sums and their log, where rank 1 lacks something."""

    def no_memory(staging: symmetric.Staging) -> None:
        if group.rank == 1:
            raise torch.OutOfMemoryError("no memory left")
        allocate(staging)

    def does_not_meet(staging: symmetric.Staging) -> None:
        raise RuntimeError("no peer access")

    with FakeWays(table(group.size)) as fake, Log() as log:
        patch = fake.patch
        if what == "memory":
            patch.setattr(symmetric.Staging, "allocate", no_memory)
        elif what == "a link":
            patch.setattr(symmetric.Staging, "meet", does_not_meet)
        elif what == "multicast":
            patch.setattr(symmetric.Staging, "meet", lambda staging: setattr(staging, "multicast", group.rank != 1))
        elif what == "an operator" and group.rank == 1:
            patch.setitem(symmetric._OPERATORS, "one_shot", "absent")
        elif what == "the GPU" and group.rank == 1:
            patch.setattr(ways, "machine", lambda device: "another")
        elif what == "the host" and group.rank == 1:
            patch.setattr(ways.socket, "gethostname", lambda: "another")
        elif what == "the table" and group.rank == 1:
            patch.setattr(windows, "WINDOWS", table(group.size, WINDOWS[:1]))
        for nbytes in (64, 1024, 2048, 64, 1024):
            x = torch.full((nbytes // 4,), float(group.rank + 1))
            assert torch.equal(all_reduce(x, group), torch.full_like(x, 3.0))
        return fake.calls, log.lines


NCCL = "sums over 2 ranks are NCCL's own"
LACKS = {
    "memory": (
        ["own"] * 5,
        f"{NCCL}, not one_shot and two_shot and multimem: rank 1: OutOfMemoryError: no memory left",
    ),
    "a link": (["own"] * 5, f"{NCCL}, not one_shot and two_shot and multimem: rank 0: RuntimeError: no peer access"),
    "multicast": (
        ["one_shot", "two_shot", "own", "one_shot", "two_shot"],
        f"{NCCL}, not multimem: rank 1: its switch does not multicast",
    ),
    "an operator": (
        ["own", "two_shot", "multimem", "own", "two_shot"],
        f"{NCCL}, not one_shot: rank 1: torch {torch.__version__} has no symm_mem.absent",
    ),
    "the GPU": (["own"] * 5, f"{NCCL}: they have not one GPU"),
    "the host": (["own"] * 5, f"{NCCL}: they have not one host"),
    "the table": (["own"] * 5, f"{NCCL}: they have not one table"),
}


@pytest.mark.parametrize("what", LACKS)
def test_what_one_rank_lacks_no_rank_takes_and_a_line_says_so(ranks, what):
    calls, line = LACKS[what]
    assert ranks(2, failing, what) == [(calls, [line])] * 2


def test_two_shot_is_for_the_sizes_that_torch_has(ranks):
    of = table(3, [(64, 64, "two_shot"), (128, 128, "one_shot")])
    assert ranks(3, reduced, torch.float32, [16, 32], of) == [["own", "one_shot"]] * 3


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


def outputs(group: Group, overlap: Any, options: Options, grad: bool) -> tuple[list[str], bool]:
    """Three outputs of a layer of 4096 bytes, alive at once."""
    full = nn.Linear(8, 16)
    with torch.no_grad():
        full.weight.copy_(integers(16, 8, seed=1))
        full.bias.copy_(integers(16, seed=2))
    layer = RowwiseLinear.from_linear(full, group=group, options=options)
    layer.overlap = overlap
    inputs = [integers(4, 16, 8, seed=seed) for seed in (3, 4, 5)]
    with FakeWays(table(group.size)) as fake, torch.set_grad_enabled(grad):
        found = [layer(layer.features.take(x, group.rank, group.size)) for x in inputs]
    return fake.calls, all(torch.equal(y, full(x)) for x, y in zip(inputs, found, strict=True))


LAYERS = {
    "whole": (None, Options(), False, ["memory", "own"]),
    "put off": (Overlap(1, later=True), Options(), False, ["memory"]),
    # By the length of a chunk: of 2048 bytes no window says that memory matters.
    "in chunks": (Overlap(2), Options(), False, ["own", "own"]),
    "differentiated": (None, Options(), True, ["own"]),
    # 8192 bytes then.
    "in float64": (None, Options(reduce_dtype=torch.float64), False, ["own"]),
}


@pytest.mark.parametrize("case", LAYERS)
def test_outputs_are_in_registered_memory_where_a_window_says_so(ranks, case):
    overlap, options, grad, calls = LAYERS[case]
    assert ranks(2, outputs, overlap, options, grad) == [(calls * 3, True)] * 2


def test_chunks_of_a_window_are_in_registered_memory(ranks):
    assert ranks(2, longer) == [["memory", "own", "own"]] * 2


def longer(group: Group) -> list[str]:
    layer = RowwiseLinear.from_linear(nn.Linear(8, 16), group=group)
    layer.overlap = Overlap(2)
    with FakeWays(table(group.size)) as fake, torch.no_grad():
        layer(torch.ones(128, layer.in_features))
    return fake.calls


def real(group: Group) -> str:
    assert group.process_group is not None
    return registered.missing(group.device, group.process_group)


def test_gloo_registers_no_memory(ranks):
    assert ranks(2, real) == ["ProcessGroupGloo registers no memory"] * 2


# As `symmetric.py` calls them.
SCHEMAS = {
    "one_shot": "(Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name, Tensor(a!) out)",
    "two_shot": "(Tensor(a!) input, str reduce_op, str group_name, Tensor(b!) output)",
    "multimem": "(Tensor(a!) input, str reduce_op, str group_name)",
}


@pytest.mark.parametrize("way", symmetric.SUMS)
def test_torchs_operators_take_what_they_are_given(way):
    name = symmetric._OPERATORS[way]
    assert symmetric.missing(way, 2) == ""
    assert str(getattr(torch.ops.symm_mem, name).default._schema).startswith(f"symm_mem::{name}{SCHEMAS[way]}")
