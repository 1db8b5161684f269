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


def test_a_row_has_all_times_and_what_follows_from_them(ranks):
    for row, too_long in ranks(2, rows):
        gemm, reduce = row["gemm_ms"], row["all_reduce_ms"]
        assert row["chunks"] > 1 and too_long == {}
        assert row["hidden"] == pytest.approx(
            (gemm + reduce - row["overlapped_ms"]) / min(gemm, reduce), rel=0.5, abs=1
        )
        assert row["ratio"] == pytest.approx(row["overlapped_ms"] / row["plain_ms"], rel=0.5, abs=0.1)


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
