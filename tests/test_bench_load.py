"""The benchmark of loading: its own ways do what they say, and a bound that is missed is told."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import load as bench
import load_ways
from families import FAMILIES
from tp_layers.loader.report import LoadReport

OWN = [way for way in load_ways.WAYS if "diffusers" not in way]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A tiny FLUX.2, in several files."""
    made = tmp_path_factory.mktemp("flux2")
    FAMILIES["Flux2Transformer2DModel"].build(dtype=torch.bfloat16).save_pretrained(made, max_shard_size="50KB")
    return made


def test_every_way_of_ours_is_timed_and_a_reload_is_right_after_a_memcpy(ranks, folder):
    reports: list[LoadReport] = ranks(2, load_ways.keep, folder)
    assert [report.rank for report in reports] == [0, 1]
    for way in OWN:
        for seen in ranks(2, load_ways.timed, way, folder, True):
            assert seen["seconds"] > 0 and seen["disk"] >= 0
    ranks(2, load_ways.timed, "memcpy", folder, False)
    assert ranks(2, load_ways.is_right, folder) == [False, False]
    ranks(2, load_ways.timed, "reload", folder, False)
    assert ranks(2, load_ways.is_right, folder) == [True, True]
    ranks(2, load_ways.forget)


def rows(**seconds: float) -> list[dict[str, Any]]:
    """Rows of a run in which every way took a second, but for those given as `measure_way`."""
    ways = {(name, way) for name, *pair, _ in bench.BOUNDS for way in pair}
    named = {(name, way): f"{name} {way}".replace(" ", "_").replace(",", "") for name, way in ways}
    row = {"size": 2, "disk_mb": 100.0, "beyond_shard_mib": 10.0}
    return [{"measure": it[0], "way": it[1], "seconds": seconds.get(key, 1.0), **row} for it, key in named.items()]


def test_bounds_compare_what_they_name():
    found = {name: (figure, most) for name, figure, most in bench.bounds(rows(in_place_reload=3.0), 100_000_000)}
    assert found["in place: reload / memcpy"] == (3.0, 2.0)
    assert found["in place: reload / diffusers, copied on"] == (3.0, 0.35)
    assert found["cold: disk / files"] == (1.0, 1.05) and found["fresh: peak beyond the shard, MiB"] == (10.0, 64)
    assert len(found) == len(bench.BOUNDS) + 2
