"""Ways of summing that a rank has not got are taken by none, and one line of the log says so."""

import logging

import pytest
import torch

from fake_ways import WINDOWS, FakeWays, allocate, reduced, table
from tp_layers import registered, symmetric, ways, windows
from tp_layers.collectives import all_reduce
from tp_layers.group import Group


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


def real(group: Group) -> str:
    assert group.process_group is not None
    return registered.missing(group.device, group.process_group)


def test_gloo_registers_no_memory(ranks):
    assert ranks(2, real) == ["ProcessGroupGloo registers no memory"] * 2
