"""The benchmark of all-reduces: what a row says of a way, right, wrong or missing, and the windows it leads to."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import all_reduce as bench
import choose_windows
from fake_ways import GPU, FakeWays
from tp_layers import windows
from tp_layers.collectives import all_reduce
from tp_layers.group import Group


def rows(group: Group, dtype: torch.dtype) -> list[dict[str, Any]]:
    found, notes = bench.ways(group)
    own, anywhere = found["nccl"]

    def differs(x: torch.Tensor) -> None:
        own(x)
        if group.rank == 1:
            x *= 1 + 1e-2

    def forgets(x: torch.Tensor) -> None:
        own(x)
        x[0] -= 1

    found |= {"differs": (differs, anywhere), "forgets": (forgets, anywhere)}
    return bench.rows(found, notes | {"absent": "is not here"}, 4096, dtype, group, 2)


@pytest.mark.parametrize("dtype", bench.DTYPES, ids=str)
def test_a_row_says_whether_sums_are_right_and_ranks_agree(ranks, dtype):
    for made in ranks(2, rows, dtype):
        assert [row["way"] for row in made] == ["nccl", "differs", "forgets", "absent"]
        own, differs, forgets, absent = made
        assert (own["right"], own["identical"]) == (True, True) and float(own["error"]) < 4e-3
        assert (differs["right"], differs["identical"]) == (False, False)
        assert (forgets["right"], forgets["identical"]) == (False, True)
        assert absent["note"] == "is not here" and absent["microseconds"] == ""
        assert float(own["microseconds"]) > 0 and (own["size"], own["bytes"]) == (2, 4096)
        assert list(own) == list(absent)


def first_problem(group: Group) -> list[Any]:
    def step() -> str:
        if group.rank == 1:
            raise RuntimeError("no\n memory")
        return "made"

    return [bench.tried(group, step), bench.tried(group, lambda: 3), bench.tried(group, step, "is not here")]


def test_a_step_that_fails_on_one_rank_is_taken_by_none(ranks):
    for found in ranks(2, first_problem):
        assert found == [(None, "RuntimeError: no memory"), (3, ""), (None, "is not here")]


def row(nbytes: int, way: str, microseconds: float | str, **other: Any) -> dict[str, Any]:
    key = {"machine": GPU, "size": 4, "dtype": "bfloat16", "torch": "2", "commit": "abc"}
    sums = {"right": True, "identical": True, "note": ""}
    return key | {"bytes": nbytes, "way": way, "microseconds": microseconds} | sums | other


def chosen(tmp_path: Path, made: list[dict[str, Any]]) -> tuple[dict[Any, Any], str]:
    """The table that is written, and the text of its file."""
    lines = [",".join(made[0])] + [",".join(map(str, row.values())) for row in made]
    (tmp_path / "all_reduce.csv").write_text("\n".join(lines) + "\n")
    choose_windows.main([str(tmp_path / "all_reduce.csv"), "--output", str(tmp_path / "windows.py")])
    text, found = (tmp_path / "windows.py").read_text(), {}
    exec(text, found)
    return found["WINDOWS"], text


# Of each size: NCCL's time, and those of ways.
TIMES = {
    8: (20, {"one_shot": 10, "two_shot": 15}),
    16: (20, {"one_shot": 12, "two_shot": 15}),
    32: (20, {"one_shot": 25, "two_shot": 19.5}),
    64: (20, {"two_shot": 18}),
    128: (30, {"multimem": 20, "registered": 25}),
    256: (50, {"registered": 45}),
    512: (90, {"registered": 80}),
}


def table() -> list[dict[str, Any]]:
    made = []
    for nbytes, (own, others) in TIMES.items():
        made += [row(nbytes, "nccl", own)] + [row(nbytes, way, time) for way, time in others.items()]
    return made


def test_windows_are_runs_of_sizes_with_one_fastest_way(tmp_path):
    found, text = chosen(tmp_path, table())
    # 19.5 of 20 microseconds is not worth it.
    wanted = ((8, 16, "one_shot"), (64, 64, "two_shot"), (128, 128, "multimem"), (256, 512, "registered"))
    assert found == {(GPU, 4, "bfloat16"): wanted}
    assert '(8, 16, "one_shot"),  # 1.67' in text and f"Measured on {GPU}, torch 2, commit abc." in text


UNTRUSTED = {
    "wrong at another size": [row(1024, "nccl", 9), row(1024, "one_shot", 8, right=False)],
    "ranks differ at another size": [row(1024, "nccl", 9), row(1024, "one_shot", 8, identical=False)],
}


@pytest.mark.parametrize("case", UNTRUSTED)
def test_a_way_that_was_wrong_once_is_taken_nowhere(tmp_path, case):
    (found,) = chosen(tmp_path, table() + UNTRUSTED[case])[0].values()
    assert found[0] == (8, 16, "two_shot") and all(way != "one_shot" for _, _, way in found)


def test_what_was_not_measured_is_not_chosen(tmp_path):
    made = [
        row(8, "one_shot", 1),
        row(16, "nccl", 20),
        row(16, "one_shot", "", note="is not here"),
        row(32, "nccl", 20, machine="CPU x86_64"),
        row(32, "one_shot", 1, machine="CPU x86_64"),
        row(64, "nccl", 20),
        row(64, "unheard of", 1),
    ]
    assert chosen(tmp_path, made)[0] == {}


def test_machines_sizes_and_dtypes_are_apart(tmp_path):
    made = []
    for other in ({}, {"machine": "another"}, {"size": 8}, {"dtype": "float32"}):
        made += [row(8, "nccl", 20, **other), row(8, "one_shot", 10, **other)]
    keys = [(GPU, 4, "bfloat16"), ("another", 4, "bfloat16"), (GPU, 8, "bfloat16"), (GPU, 4, "float32")]
    assert chosen(tmp_path, made)[0] == dict.fromkeys(keys, ((8, 8, "one_shot"),))


def test_the_written_file_is_as_the_formatter_has_it_and_the_shipped_one_is_empty(tmp_path):
    ruff = pytest.importorskip("ruff", reason="the formatter is not installed")
    assert chosen(tmp_path, [row(8, "nccl", 20, machine="CPU x86_64")]) == ({}, Path(windows.__file__).read_text())
    for made in (table(), [row(8, "nccl", 20), row(8, "one_shot", 10)]):
        _, text = chosen(tmp_path, made)
        command = [ruff.find_ruff_bin(), "format", "--check", "--line-length", "120", str(tmp_path / "windows.py")]
        assert subprocess.run(command, timeout=60).returncode == 0, text


def taken(group: Group, of: dict[Any, Any]) -> list[str]:
    with FakeWays(of) as fake:
        for nbytes in (16, 24, 64, 128, 256, 384, 512):
            all_reduce(torch.ones(nbytes // 2, dtype=torch.bfloat16), group)
        return fake.calls


def test_the_package_takes_what_was_written(ranks, tmp_path):
    found, _ = chosen(tmp_path, table())
    ways = ["one_shot", "own", "two_shot", "multimem", "own", "own", "own"]
    assert ranks(4, taken, found) == [ways] * 4
