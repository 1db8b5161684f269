"""The benchmark of a step: its ways compute the same, on shards, and a bound that is missed is told."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import step as bench

ROW = {"hidden": 64, "way": "tp_layers", "milliseconds": 1.0, "ratio": 0.5, "most": 0.7, "error": "3.0e-07"}


def test_every_way_gives_the_full_models_output_and_is_timed(ranks):
    for errors in ranks(2, bench.prepare, 64):
        assert list(errors) == list(bench.WAYS) and all(error <= bench.ERROR for error in errors.values())
    for way in bench.WAYS:
        assert all(seconds > 0 for seconds in ranks(2, bench.timed, way, 1))


def test_a_ratio_is_the_median_of_the_rounds_own(monkeypatch):
    seconds = iter([9, 9, 2, 1, 4, 4, 10, 6])  # A round that does not count, then three of 0.5, 1 and 0.6.

    class Ranks:
        def run(self, function, *args):
            return [dict.fromkeys(bench.WAYS, 1e-7)] * 2 if function is bench.prepare else [0.1, next(seconds)]

    monkeypatch.setattr(bench, "WAYS", {"tp_layers": None, "diffusers": None})
    ours, theirs = bench.measure(Ranks(), 64, 3, 1)
    assert (ours["ratio"], theirs["ratio"], ours["milliseconds"], ours["most"]) == (0.6, 1.0, 4000, bench.MOST[64])
    assert theirs["most"] == "" and not bench.missed(ours) and not bench.missed(theirs)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [({}, False), ({"ratio": 0.71}, True), ({"error": "1.1e-06"}, True), ({"ratio": 2.0, "most": ""}, False)],
    ids=["within", "slow", "wrong", "without a bound"],
)
def test_what_is_missed(change, wanted):
    assert bench.missed(ROW | change) is wanted
