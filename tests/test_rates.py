"""Rates of compute and communication: the same on all ranks, and when they say that chunks pay."""

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import tp_layers
from families import FAMILIES
from tp_layers import RowwiseLinear, rates
from tp_layers.group import Group
from tp_layers.rates import Rates, measure

FLUX = FAMILIES["FluxTransformer2DModel"]


def measured(group: Group) -> tuple[Rates, list[Any]]:
    model = tp_layers.apply(FLUX.build(), group=group, overlap=True)
    layers = [module for module in model.modules() if isinstance(module, RowwiseLinear)]
    return measure(group, torch.float32, width=64, rows=8, rounds=2), [layer.overlap.chunks for layer in layers]


def test_what_is_hidden_is_a_part_of_the_shorter():
    assert [rates._hidden(3.0, 2.0, both) for both in (3.0, 4.0, 5.0, 9.0, 1.0)] == [1.0, 0.5, 0.0, 0.0, 1.0]


@pytest.mark.parametrize(("disturbed", "hidden"), [(0, 0.75), (4, 0.75), (5, 0.0)])
def test_what_is_hidden_is_seen_in_most_rounds(disturbed, hidden, monkeypatch):
    monkeypatch.setattr(
        rates,
        "_slowest",
        lambda ways, group, rounds: [[2.0, 1.0, 9.0]] * disturbed + [[2.0, 1.0, 2.25]] * (rounds - disturbed),
    )
    assert rates._measure_hidden(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1), Group(), rounds=5) == hidden


@pytest.mark.parametrize(("gemm", "reduce", "inner", "sent"), [(0.02, 0.005, 16, 16), (0.005, 0.02, 64, 4)])
def test_what_is_hidden_is_measured_of_two_that_take_alike(gemm, reduce, inner, sent, monkeypatch):
    monkeypatch.setattr(rates, "_slowest", lambda ways, *_: [[gemm, 0.004, 0.001, 0.002, reduce]])
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(rates, "_measure_hidden", lambda *given: shapes.extend(tuple(x.shape) for x in given[:3]))
    measure(Group(), torch.float32, width=64, rows=16)
    assert shapes == [(16, inner), (inner, 64), (sent, 64)]


def test_each_round_times_every_way_once_in_another_order(monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(rates, "_timed", lambda way, group: seen.append(way) or float(way))
    found = rates._slowest([1, 2, 3], Group(), rounds=8)
    assert found == [[1.0, 2.0, 3.0]] * 8
    rounds = [tuple(seen[start : start + 3]) for start in range(0, len(seen), 3)]
    assert all(sorted(one) == [1, 2, 3] for one in rounds) and len(set(rounds)) > 2


def test_rates_are_the_same_on_all_ranks(ranks):
    results = ranks(2, measured)
    assert results[0] == results[1]
    found, used = results[0]
    assert min(found.flops, found.latency, found.transfer, found.weights) > 0 and 0 <= found.hidden <= 1
    assert 0 <= found.further <= found.latency
    assert len(set(used)) == 1 and isinstance(used[0], Rates)


LAYER = dict(rows=4096, width=3072, columns=1536, itemsize=2)


def count(rates: Rates, **changed: int) -> int:
    return len(rates.widths(**{**LAYER, **changed}))


def test_chunks_pay_where_gemm_and_reduction_take_alike():
    # 39 GFLOP and 25 MB: 0.1 s each.
    balanced = Rates(flops=3.9e11, latency=1e-5, transfer=2.5e8)
    assert count(balanced) == 16
    seconds = [balanced.seconds([3072 // chunks] * chunks, **LAYER) for chunks in rates.CHUNKS]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 0.6 * seconds[0]


@pytest.mark.parametrize("flops", [3.9e10, 2e11, 3.9e11, 8e11, 3.9e12])
def test_what_cannot_be_hidden_is_the_smallest_chunk(flops):
    found = Rates(flops=flops, latency=1e-5, transfer=2.5e8)
    widths = found.widths(**LAYER)
    assert sum(widths) == 3072 and min(widths) >= rates.FEWEST_COLUMNS and len(widths) > 2
    # The GEMM of the first, or the reduction of the last, by what takes longer; but for the rounding to whole tiles.
    steps = [after - before for before, after in itertools.pairwise(widths)]
    assert all((-step if flops < 3.9e11 else step) >= -rates.MULTIPLE for step in steps)
    # Of a GPU and of a processor.
    assert all(width % 64 == 0 and width % 48 == 0 for width in widths[:-1])
    # Of equal ones they differ by their rounding at most, but where one of the two takes much longer.
    equal = [3072 // len(widths)] * len(widths)
    assert found.seconds(widths, **LAYER) <= 1.03 * found.seconds(equal, **LAYER)
    if flops in (3.9e10, 3.9e12):
        assert max(widths[0], widths[-1]) > 4 * min(widths[0], widths[-1])
        assert found.seconds(widths, **LAYER) < 0.99 * found.seconds(equal, **LAYER)


def test_chunks_do_not_pay_where_one_takes_all_or_each_costs_much():
    assert count(Rates(flops=3.9e14, latency=1e-5, transfer=2.5e8)) == 1
    assert count(Rates(flops=3.9e11, latency=1e-5, transfer=1e13)) == 1
    assert count(Rates(flops=3.9e11, latency=1.0, transfer=2.5e8)) == 1
    assert count(Rates(flops=3.9e11, latency=2e-2, transfer=2.5e8)) in (2, 3, 4)
    assert count(Rates(flops=3.9e11, latency=1e-9, transfer=2.5e8), width=255) == 1
    assert count(Rates(flops=3.9e11, latency=1e-9, transfer=2.5e8), rows=0) == 1
    # Nothing is gained where the processor that computes moves the bytes.
    assert count(Rates(flops=3.9e11, latency=1e-5, transfer=2.5e8, hidden=0.0)) == 1
    # Each chunk goes through an input anew that takes as long as the whole GEMM.
    assert count(Rates(flops=3.9e11, latency=1e-5, transfer=2.5e8, weights=6.3e7)) == 1


def test_reductions_under_way_together_allow_more_chunks():
    slow = Rates(flops=3.9e11, latency=2e-2, transfer=2.5e8)
    assert count(replace(slow, further=2e-2)) == count(slow) < count(replace(slow, further=1e-5))
    # The last one is waited for.
    first, second = (replace(slow, further=further).seconds([1536, 1536], **LAYER) for further in (0.0, 1e-3))
    assert second - first == pytest.approx(1e-3)
    assert slow.seconds([3072], **LAYER) == replace(slow, further=0.0).seconds([3072], **LAYER)


# A GEMM of 17 ms and a reduction of 25 ms, of two CPU ranks over 1 Gbit/s.
CPUS = Rates(flops=1.9e11, latency=3e-4, transfer=1.24e8, weights=1.5e9, hidden=0.67, further=6e-5)
NARROW = dict(rows=256, width=3072, columns=1536, itemsize=4)


def test_what_one_reduction_does_not_hide_several_do():
    equal, growing = [192] * 16, [224, 288, 384, 528, 704, 944]
    # 28 and 33 ms were measured: the reductions of equal chunks queue up, those of growing ones are taken one by one.
    queued, one_by_one = (CPUS.seconds(widths, **NARROW) for widths in (equal, growing))
    assert 0.028 < queued < 0.031 < one_by_one < 0.034 and len(CPUS.widths(**NARROW)) >= 12
    # What two hide together is no more than what is left by one, as often.
    hidden = [replace(CPUS, hidden=hidden).seconds(equal, **NARROW) for hidden in (0.0, 1.0)]
    gemm, again = CPUS._whole(**NARROW)[0] * 15 / 16, 15 * 256 * 1536 / CPUS.weights
    assert hidden[0] - hidden[1] == pytest.approx(gemm + again)
    assert 0.33**2 * (gemm + again) < queued - hidden[1] < 0.6 * 0.33 * (gemm + again)


@pytest.mark.parametrize("flops", [4.7e10, 7.9e10, 9.3e10])
@pytest.mark.parametrize("hidden", [0.55, 0.75, 0.85])
def test_the_first_reduction_starts_early_however_noisy_the_rates(flops, hidden):
    """A GEMM of 33 ms and a reduction of 25 ms: 4 chunks, half in the first, took 1.1 times as long as these."""
    found = Rates(flops, latency=4e-4, transfer=1.25e8, weights=1.4e9, hidden=hidden, further=2e-4)
    widths = found.widths(**NARROW)
    assert len(widths) >= 6 and widths[0] <= 960 and widths[-1] <= 384


def test_where_gemms_take_longer_each_reduction_is_alone():
    layer, widths = {**NARROW, "columns": 6144}, [1728, 768, 384, 192]
    lost = CPUS.seconds(widths, **layer) - replace(CPUS, hidden=1.0).seconds(widths, **layer)
    assert lost == pytest.approx(0.33 * sum(256 * width * 4 / 1.24e8 + 6e-5 for width in widths[:-1]))


def test_chunks_are_put_together_and_the_whole_is_not():
    for widths, factor in (([1536, 1536], 1), ([3072], 0)):
        # Of an input without columns, so that only what is put together goes through memory.
        layer = {**NARROW, "columns": 0}
        slow, fast = (replace(CPUS, weights=weights).seconds(widths, **layer) for weights in (1e9, math.inf))
        assert slow - fast == pytest.approx(factor * 256 * 3072 / 1e9)


def test_what_a_further_reduction_adds(monkeypatch):
    """One takes 1 ms, and as many as are started at once 2 ms, on the slowest rank."""
    monkeypatch.setattr(rates, "_slowest", lambda ways, *_: [[0.02, 0.01, 0.001, 0.002, 0.005][: len(ways)]] * 3)
    assert measure(Group(), torch.float32, width=64, rows=16).further == pytest.approx(0.001 / (rates.AT_ONCE - 1))


def test_those_are_all_started_before_one_is_waited_for(monkeypatch):
    calls = []

    def start(x: torch.Tensor, group: Group) -> Any:
        calls.append("started")
        return lambda: calls.append("waited for")

    monkeypatch.setattr(rates, "start_all_reduce", start)
    rates._at_once(torch.zeros(1), Group())
    assert calls == ["started"] * rates.AT_ONCE + ["waited for"] * rates.AT_ONCE and rates.AT_ONCE > 2
