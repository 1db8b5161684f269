"""Median times of interleaved variants, each from a cold L2 cache."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

# Bytes: many times any L2, and long enough to write that the host has launched the variant before it starts.
FLUSHED = 2**29
MOST = 50


class Times(NamedTuple):
    """Seconds of one call: the median, the distance of the quartiles as a part of it, and the host's own median.

    Where the host takes longer than the flush before the call, the device waits for it, and its time says so.
    """

    median: float
    spread: float
    host: float


# Seconds of each call: on the device, and on the host.
Calls = dict[str, list[tuple[float, float]]]


def interleaved(
    variants: Mapping[str, Callable[[], Any]], device: str, seconds: float = 0.2, least: int = 3
) -> dict[str, Times]:
    """Times every variant in turn, `least` to `MOST` rounds for about `seconds`; the variants have run before."""
    run = _on_cuda if device == "cuda" else _on_cpu
    began = time.perf_counter()
    run(variants, 1)
    rounds = max(least, min(MOST, int(seconds / (time.perf_counter() - began))))
    return {name: summary(calls) for name, calls in run(variants, rounds).items()}


def summary(calls: list[tuple[float, float]]) -> Times:
    """Of at least two calls."""
    low, middle, high = statistics.quantiles([device for device, _ in calls], n=4, method="inclusive")
    return Times(middle, (high - low) / middle if middle else 0.0, statistics.median(host for _, host in calls))


def _on_cuda(variants: Mapping[str, Callable[[], Any]], rounds: int) -> Calls:
    scratch = torch.empty(FLUSHED, dtype=torch.int8, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event, float]]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            scratch.zero_()
            start.record()
            began = time.perf_counter()
            variant()
            host = time.perf_counter() - began
            end.record()
            events[name].append((start, end, host))
    torch.cuda.synchronize()
    return {
        name: [(start.elapsed_time(end) / 1e3, host) for start, end, host in calls] for name, calls in events.items()
    }


def _on_cpu(variants: Mapping[str, Callable[[], Any]], rounds: int) -> Calls:
    times: Calls = {name: [] for name in variants}
    for _ in range(rounds):
        for name, variant in variants.items():
            began = time.perf_counter()
            variant()
            times[name].append((time.perf_counter() - began,) * 2)
    return times


def roofs(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """What the machine does at best: operations per second of a large product, bytes per second of a large copy."""
    side, length = (8192, 2**30) if device == "cuda" else (256, 2**20)
    a, b = (torch.randn(side, side, device=device, dtype=dtype) for _ in range(2))
    source = torch.randn(length // dtype.itemsize, device=device, dtype=dtype)
    target = torch.empty_like(source)
    pair = {"matmul": lambda: torch.mm(a, b), "copy": lambda: target.copy_(source)}
    for variant in pair.values():
        variant()
    times = interleaved(pair, device)
    return 2 * side**3 / times["matmul"].median, 2 * length / times["copy"].median
