"""All-reduces by size of message: NCCL's, on registered memory, and through symmetric memory: `results/all_reduce.csv`.

    torchrun --nproc-per-node 8 bench/all_reduce.py [--seconds 120] [--output bench/results/all_reduce.csv]
    torchrun --nproc-per-node 2 bench/all_reduce.py --dry-run

One row for each dtype, size and way (see `tp_layers/ways.py`): the median time of a call, several in a row so that the
host is not waited for, from when all ranks are ready; of the ranks the slowest counts, and the ways take turns.
`bus_gbytes` is what a rank sends in a second, as NCCL's own tests count it, and `percent_of_link` its part of the roof:
the link of the GPU's data sheet, where `tp_layers/hardware.py` has it. `right`: sums of small integers are exact, on
every rank. `identical`: of random numbers all ranks have the same bits. `error`: their distance from the sum in
float64. A way that is missing has a note instead.

What follows for `tp_layers/windows.py` is `choose_windows.py`'s to say. A dry run is on CPU ranks (gloo), has only the
group's own way, and no figure worth reading. Exits with 1 if a sum was wrong or ranks differed.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from record import RESULTS, Table
from tp_layers import registered, symmetric
from tp_layers.exchange import gather_objects, largest
from tp_layers.group import Group
from tp_layers.hardware import HARDWARE

KIB, MIB = 1 << 10, 1 << 20
SIZES = [8 * KIB << power for power in range(16)]
DTYPES = [torch.bfloat16, torch.float32]
ROUNDS = 15
# Elements that are compared with float64, and integers that bfloat16 sums exactly over up to 36 ranks.
SAMPLE, INTEGERS, RANKS = 1 << 18, 5, 4
# Cycles of the device in which the host gets ahead of it.
AHEAD = 1_000_000
FIGURES = ("microseconds", "spread", "bus_gbytes", "percent_of_link", "right", "identical", "error", "note")
Run = Callable[[torch.Tensor], Any]
# A call, and where its tensor has to be.
Way = tuple[Run, Callable[[int, torch.dtype], torch.Tensor]]


def ways(group: Group) -> tuple[dict[str, Way], dict[str, str]]:
    """What this machine can do, alike on all ranks, and why it cannot do the rest."""
    device, process_group = group.device, group.process_group
    assert process_group is not None

    def anywhere(length: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=device)

    def own(x: torch.Tensor) -> None:
        dist.all_reduce(x, group=process_group)

    found: dict[str, Way] = {"nccl": (own, anywhere)}
    notes: dict[str, str] = {}
    if device.type == "cpu":
        return found, notes
    pool, notes["registered"] = tried(
        group, lambda: registered.Pool(device, process_group), registered.missing(device, process_group)
    )
    if pool is not None:
        found["registered"] = (own, lambda length, dtype: pool.empty((length,), dtype).zero_())
    staging = symmetric.Staging(SIZES[-1], device, process_group.group_name)
    _, problem = tried(group, staging.allocate)
    if not problem:
        _, problem = tried(group, staging.meet)
    for way in symmetric.SUMS:
        missing = symmetric.missing(way, group.size)
        if way == "multimem" and not staging.multicast:
            missing = missing or "its switch does not multicast"
        notes[way] = problem or tried(group, lambda way=way: trial(staging, way), missing)[1]
        if not notes[way]:
            found[way] = (lambda x, way=way: staging.sum(way, x), anywhere)
    return found, notes


def trial(staging: symmetric.Staging, way: str) -> None:
    """One sum, to its end."""
    staging.sum(way, torch.zeros(KIB, device=staging.device))
    torch.cuda.synchronize(staging.device)


def tried(group: Group, step: Callable[[], Any], missing: str = "") -> tuple[Any, str]:
    """What a step returns, or None and the first problem of any rank."""
    result = None
    if not missing:
        try:
            result = step()
        except Exception as error:
            missing = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    problem = next(filter(None, gather_objects(missing, group)), "")
    return (None if problem else result), problem


def checked(way: Way, length: int, dtype: torch.dtype, group: Group) -> dict[str, Any]:
    """Whether a way's sums are right and the same on all ranks, and how far they are from float64."""
    run, memory = way
    x = memory(length, dtype)
    places = torch.arange(length, device=x.device, dtype=torch.int32).remainder_(INTEGERS).to(dtype)
    x.copy_(places + group.rank % RANKS)
    run(x)
    wanted = places * group.size + sum(rank % RANKS for rank in range(group.size))
    right = bool(torch.equal(x, wanted))
    count = min(length, SAMPLE)
    terms = [
        torch.randn(count, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
        for rank in range(group.size)
    ]
    x.zero_()[:count] = terms[group.rank]
    run(x)
    sample, exact = x[:count].cpu(), sum(term.double() for term in terms)
    bits = sample.view(torch.int16 if dtype.itemsize == 2 else torch.int32).long()
    digest = int((bits * (torch.arange(count) * 2 + 1)).sum())
    everyone = gather_objects((right, digest), group)
    return {
        "right": all(right for right, _ in everyone),
        "identical": len({digest for _, digest in everyone}) == 1,
        "error": f"{float((sample.double() - exact).norm() / exact.norm()):.1e}",
    }


def sample_seconds(run: Run, x: torch.Tensor, calls: int, group: Group) -> float:
    """Of one of several calls in a row, from when all ranks are ready."""
    largest(torch.zeros(1, device=x.device), group)
    if not x.is_cuda:
        began = time.perf_counter()
        for _ in range(calls):
            run(x)
        return (time.perf_counter() - began) / calls
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(AHEAD)
    start.record()
    for _ in range(calls):
        run(x)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / calls


def timed(
    found: dict[str, Way], length: int, dtype: torch.dtype, group: Group, rounds: int
) -> dict[str, tuple[float, float]]:
    """For each way the median seconds of the slowest rank, and the distance of the quartiles as a part of it."""
    # Zeros stay zeros, however often they are summed.
    tensors = {name: memory(length, dtype) for name, (_, memory) in found.items()}
    calls = 20 if length * dtype.itemsize <= MIB else 4
    seconds: dict[str, list[float]] = {name: [] for name in found}
    for number in range(rounds + 1):
        for name, (run, _) in found.items():
            sample = sample_seconds(run, tensors[name], calls, group)
            if number:
                seconds[name].append(sample)
    flat = torch.tensor(list(seconds.values()), dtype=torch.float64, device=group.device)
    slowest = largest(flat, group).tolist()
    result = {}
    for name, samples in zip(found, slowest, strict=True):
        # NCCL launches nothing for the sum of one rank.
        low, middle, high = (max(it, 1e-9) for it in statistics.quantiles(samples, n=4, method="inclusive"))
        result[name] = (middle, (high - low) / middle)
    return result


def link() -> float:
    """Bytes a second of this GPU's links, by its data sheet; 0 where that is not known."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return next((known.link for known in HARDWARE.values() if known.name in name.replace(" ", "")), 0.0)


def rows(
    found: dict[str, Way], notes: dict[str, str], nbytes: int, dtype: torch.dtype, group: Group, rounds: int
) -> list[dict[str, Any]]:
    """Those of one dtype and size, a way each."""
    length, made = nbytes // dtype.itemsize, []
    times, roof = timed(found, length, dtype, group, rounds), link()
    key = {"size": group.size, "dtype": str(dtype).removeprefix("torch."), "bytes": nbytes}
    for name, way in found.items():
        seconds, spread = times[name]
        bus = 2 * (group.size - 1) / group.size * nbytes / seconds
        figures = {
            "microseconds": f"{seconds * 1e6:.2f}",
            "spread": f"{spread:.3f}",
            "bus_gbytes": f"{bus / 1e9:.1f}",
            "percent_of_link": f"{100 * bus / roof:.1f}" if roof else "",
        }
        made.append(key | {"way": name} | figures | checked(way, length, dtype, group) | {"note": ""})
    made += [key | {"way": name} | dict.fromkeys(FIGURES, "") | {"note": note} for name, note in notes.items() if note]
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seconds", type=float, default=120, help="of the whole run (default: 120)")
    parser.add_argument("--output", type=Path, default=RESULTS / "all_reduce.csv")
    parser.add_argument("--dry-run", action="store_true", help="on CPU ranks, three sizes")
    options = parser.parse_args()
    began, local = time.perf_counter(), int(os.environ["LOCAL_RANK"])
    if options.dry_run:
        dist.init_process_group("gloo")
    else:
        torch.cuda.set_device(local)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local))
    group, wrong = Group.of(None), 0
    found, notes = ways(group)
    # The other ranks' tables are nobody's.
    with Table(options.output if group.rank == 0 else Path(os.devnull)) as table:
        for dtype in DTYPES:
            for nbytes in SIZES[:3] if options.dry_run else SIZES:
                over = torch.tensor([time.perf_counter() - began > options.seconds], device=group.device)
                if bool(largest(over.long(), group)):
                    break
                for row in rows(found, notes, nbytes, dtype, group, 2 if options.dry_run else ROUNDS):
                    table.write(row)
                    wrong += not (row["note"] or (row["right"] and row["identical"]))
                    if group.rank == 0:
                        print(*row.values(), flush=True)
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
