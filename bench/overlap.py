"""How much of a rowwise layer's all-reduce is hidden behind its GEMM, over links of several rates: `overlap.csv`.

Two CPU (gloo) ranks of one thread, each in a network namespace of its own; the link between them is limited to a rate.
The rowwise layers of FLUX.1 (width 3072): attention's output, the MLP's, and the single blocks'. Timed in turn, in each
round: the GEMM alone, the all-reduce alone, the plain layer, and the overlapped one, whose number of chunks follows
from rates measured before; in each round in another order, as it matters what ran before. A time is the slowest rank's,
the median of the rounds counts.

    hidden   (GEMM + all-reduce - overlapped) / the smaller of GEMM and all-reduce
    ratio    overlapped / plain, the median of the rounds' own, in which what else the machine does counts on both sides

Exits with 1 if a bound is missed: hidden at least 0.6 where either takes 30 to 70 % of the two, a ratio of at most 1.03
elsewhere. Exits with 0 and says so where namespaces are not allowed.

    python bench/overlap.py [--gbit 0.05 0.1 1 10] [--rounds 8] [--output bench/results/overlap.csv] [--append]
"""

import argparse
import json
import operator
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from namespaces import ADDRESSES, Link, refused
from record import RESULTS, Table
from tp_layers import RowwiseLinear
from tp_layers.collectives import all_reduce
from tp_layers.exchange import largest
from tp_layers.failure import protect
from tp_layers.group import Group
from tp_layers.layers.overlap import Overlap
from tp_layers.rates import Rates, measure

SIZE, WIDTH = 2, 3072
# Columns of the full weight, by layer.
LAYERS = {"attention": 3072, "MLP": 12288, "single block": 15360}
TOKENS = (256, 1024)
BAND, HIDDEN, RATIO = (0.3, 0.7), 0.6, 1.03
PORT, LIMIT = 29571, 1500
# Longer ones say nothing that a shorter one does not.
LONGEST_SECONDS = 4.0
# Rounds for a row, if they fit: up to so many times as many as asked for.
ENOUGH_SECONDS, MORE = 40.0, 4
# In which the link's bucket fills: what is sent next starts like what is sent after other work.
IDLE_SECONDS = 0.005


def timed(layer: RowwiseLinear, x: torch.Tensor, way: str, rates: Rates) -> float:
    """Seconds of one call on the slowest rank, from when both are ready."""
    layer.overlap = Overlap(rates) if way == "overlapped" else None
    buffer = torch.zeros(x.shape[0], WIDTH) if way == "all_reduce" else None
    time.sleep(IDLE_SECONDS)
    largest(torch.zeros(1), layer.group)
    began = time.perf_counter()
    if buffer is not None:
        all_reduce(buffer, layer.group)
    elif way == "gemm":
        layer.partial_sum(x, None)
    else:
        layer(x)
    return float(largest(torch.tensor([time.perf_counter() - began]), layer.group))


def rank_main(rank: int, rounds: int) -> None:
    """Times every layer and prints a line of JSON for each, on rank 0."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{ADDRESSES[0]}:{PORT}", rank=rank, world_size=SIZE)
    # Over a process group of its own, as a sharded model has it.
    group = protect(Group.of(None))
    rates = measure(group, torch.float32, width=WIDTH)
    if rank == 0:
        print(rates, file=sys.stderr, flush=True)
    for name, columns in LAYERS.items():
        layer = RowwiseLinear.from_linear(nn.Linear(columns, WIDTH), group=group)
        for tokens in TOKENS:
            x = torch.randn(tokens, layer.in_features)
            with torch.no_grad():
                row = measured(layer, x, rates, rounds)
            if rank == 0 and row:
                print(json.dumps({"layer": name, "tokens": tokens, **row}), flush=True)
    dist.destroy_process_group()


def measured(layer: RowwiseLinear, x: torch.Tensor, rates: Rates, rounds: int) -> dict[str, Any]:
    """The row of one layer and input; empty if it takes too long."""
    ways = ("gemm", "all_reduce", "plain", "overlapped")
    first = [timed(layer, x, way, rates) for way in ways]
    if sum(first) > LONGEST_SECONDS * len(ways):
        return {}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(max(rounds, min(MORE * rounds, int(ENOUGH_SECONDS / sum(first))))):
        for way in random.Random(number).sample(ways, len(ways)):
            seconds[way].append(timed(layer, x, way, rates))
    gemm, reduce, plain, overlapped = (1e3 * statistics.median(seconds[way]) for way in ways)
    chunks = len(rates.widths(x.shape[0], WIDTH, layer.local, x.element_size()))
    return {
        "gemm_ms": round(gemm, 2),
        "all_reduce_ms": round(reduce, 2),
        "plain_ms": round(plain, 2),
        "overlapped_ms": round(overlapped, 2),
        "hidden": round((gemm + reduce - overlapped) / min(gemm, reduce), 3),
        "ratio": round(statistics.median(map(operator.truediv, seconds["overlapped"], seconds["plain"])), 3),
        "chunks": chunks,
    }


def over(gbit: float, rounds: int) -> list[dict[str, Any]]:
    """The rows of one link."""
    with Link(gbit) as link:
        ranks = []
        for rank, device in enumerate(link.devices):
            command = [sys.executable, __file__, "--rank", str(rank), "--rounds", str(rounds)]
            environment = {**os.environ, "GLOO_SOCKET_IFNAME": device, "OMP_NUM_THREADS": "1"}
            pipe = subprocess.PIPE if rank == 0 else None
            ranks.append(subprocess.Popen([*link.prefix(rank), *command], stdout=pipe, text=True, env=environment))
        try:
            said, _ = ranks[0].communicate(timeout=LIMIT)
            status = [process.wait(timeout=60) for process in ranks]
        finally:
            for process in ranks:
                process.kill()
    if any(status):
        raise RuntimeError(f"a rank failed over {gbit} Gbit/s, statuses {status}")
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def missed(row: dict[str, Any]) -> str:
    """The bound that a row misses, in words."""
    share = row["all_reduce_ms"] / (row["gemm_ms"] + row["all_reduce_ms"])
    if BAND[0] <= share <= BAND[1]:
        return "" if row["hidden"] >= HIDDEN else f"hidden {row['hidden']}, bound {HIDDEN}"
    return "" if row["ratio"] <= RATIO else f"ratio {row['ratio']}, bound {RATIO}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--gbit", type=float, nargs="+", default=[0.05, 0.1, 1.0, 10.0])
    parser.add_argument("--rounds", type=int, default=8, help="at least; up to 4 times as many of short calls")
    parser.add_argument("--output", type=Path, default=RESULTS / "overlap.csv")
    parser.add_argument("--append", action="store_true", help="to the rows that are there, such as other links'")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank_main(options.rank, options.rounds)
        return 0
    reason = refused()
    if reason:
        print(f"skipped: {reason}")
        return 0
    wrong = 0
    with Table(options.output, options.append) as table:
        for gbit in options.gbit:
            for row in over(gbit, options.rounds):
                table.write({"link_gbit": gbit, "size": SIZE, "width": WIDTH, **row})
                fault = missed(row)
                wrong += bool(fault)
                print(f"{gbit:6g} Gbit/s {row} {'MISSED: ' + fault if fault else ''}", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
