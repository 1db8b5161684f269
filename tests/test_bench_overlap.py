"""The benchmark of overlap: what a row says, which bound it misses, and what happens where links cannot be made."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import namespaces
import overlap as bench
from tp_layers import RowwiseLinear
from tp_layers.group import Group
from tp_layers.rates import Rates


def rows(group: Group) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "WIDTH", 512)
        layer = RowwiseLinear.from_linear(nn.Linear(32, 512), group=group)
        x = torch.ones(64, layer.in_features)
        with torch.no_grad():
            found = [bench.measured(layer, x, Rates(1e6, 1e-9, 1e5), 2)]
            patch.setattr(bench, "LONGEST_SECONDS", 0.0)
            return [*found, bench.measured(layer, x, Rates(1e6, 1e-9, 1e5), 2)]


def test_a_row_has_all_times(ranks):
    for row, too_long in ranks(2, rows):
        assert row["chunks"] > 1 and too_long == {}
        assert all(row[f"{way}_ms"] > 0 for way in SECONDS)


# Of each way in each round; the first call does not count.
SECONDS = {
    "gemm": (9.0, 0.010, 0.020, 0.012),
    "all_reduce": (9.0, 0.030, 0.010, 0.020),
    "plain": (9.0, 0.040, 0.050, 0.020),
    "overlapped": (9.0, 0.020, 0.050, 0.030),
}


def test_what_follows_from_the_times(monkeypatch):
    given = {way: iter(seconds) for way, seconds in SECONDS.items()}
    monkeypatch.setattr(bench, "timed", lambda layer, x, way, rates: next(given[way]))
    monkeypatch.setattr(bench, "LONGEST_SECONDS", 10.0)
    layer = RowwiseLinear.from_linear(nn.Linear(32, 512), group=Group())
    row = bench.measured(layer, torch.ones(64, 32), Rates(1e6, 1e-9, 1e5), 3)
    assert [row[f"{way}_ms"] for way in SECONDS] == [12, 20, 40, 30]
    # The median of the rounds' own ratios, 0.5, 1 and 1.5, and not that of the medians.
    assert (row["hidden"], row["ratio"]) == (0.167, 1.0)


ROWS = {
    "balanced and hidden": ((10, 10, 0.7, 0.8), ""),
    "balanced and not hidden": ((10, 10, 0.5, 0.8), "hidden 0.5, bound 0.6"),
    "at the edge of the band": ((7, 3, 0.5, 0.8), "hidden 0.5, bound 0.6"),
    "mostly GEMM": ((80, 20, 0.0, 1.03), ""),
    "mostly GEMM and slower": ((80, 20, 0.0, 1.04), "ratio 1.04, bound 1.03"),
    "mostly all-reduce and slower": ((20, 80, 0.0, 1.2), "ratio 1.2, bound 1.03"),
}


@pytest.mark.parametrize(("numbers", "said"), ROWS.values(), ids=ROWS)
def test_a_bound_that_is_missed_is_told(numbers, said):
    assert bench.missed(dict(zip(("gemm_ms", "all_reduce_ms", "hidden", "ratio"), numbers, strict=True))) == said


def test_where_links_cannot_be_made_that_is_said(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench, "refused", lambda: "there is no 'ip' (iproute2) here")
    monkeypatch.setattr(sys, "argv", ["overlap.py", "--output", str(tmp_path / "x.csv")])
    assert bench.main() == 0
    assert "skipped: there is no 'ip'" in capsys.readouterr().out and not list(tmp_path.iterdir())


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: None)
    assert namespaces.refused() == "there is no 'ip' (iproute2) here"
