"""What the sharded layers cost on the host beyond their GEMMs, against torch's own DTensor: `results/host.csv`.

One token through colwise -> GELU -> rowwise on the first of two ranks, where everything but the GEMMs shows. The
process group is torch's fake one, whose collectives return at once. Each time is a median over rounds that interleave
the variants; the cost of a variant is its time beyond that of plain F.linear calls of the same shapes. Exits with 1 if
DTensor's cost is less than `LEAST` times that of the layers.

    python bench/host.py [--rounds 400] [--output bench/results/host.csv]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import wait_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from record import RESULTS, Table
from tp_layers import ColwiseLinear, RowwiseLinear

SIZE, WIDTH, INNER = 2, 64, 256
LEAST = 5.0
# Calls a sample: one takes less than the clock's own noise.
CALLS = 20


def mlp() -> nn.Sequential:
    """The unsharded layers."""
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(), nn.Linear(INNER, WIDTH))


def variants() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """The same projection of one token by each way, on the shapes of one rank."""
    full = mlp()
    ours = nn.Sequential(ColwiseLinear.from_linear(full[0]), nn.GELU(), RowwiseLinear.from_linear(full[2]))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    sharded = parallelize_module(mlp(), init_device_mesh("cpu", (SIZE,)), plan)
    up, down = ours[0], ours[2]
    weights = up.weight.data, up.bias.data, down.weight.data, down.bias.data

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.gelu(F.linear(x, *weights[:2])), *weights[2:])

    def dtensor(x: torch.Tensor) -> torch.Tensor:
        # Its all-reduce is asynchronous: the first use of the result waits.
        return wait_tensor(sharded(x))

    return {"plain": plain, "tp_layers": ours, "dtensor": dtensor}


def measure(rounds: int) -> dict[str, float]:
    """Median microseconds of one call of each variant."""
    torch.set_num_threads(1)
    functions, x = variants(), torch.randn(1, WIDTH)
    samples: dict[str, list[float]] = {name: [] for name in functions}
    with torch.no_grad():
        for function in functions.values():
            for _ in range(CALLS):
                function(x)
        for _ in range(rounds):
            for name, function in functions.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    function(x)
                samples[name].append((time.perf_counter() - start) / CALLS)
    return {name: 1e6 * statistics.median(times) for name, times in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--output", type=Path, default=RESULTS / "host.csv")
    arguments = parser.parse_args()
    dist.init_process_group("fake", rank=0, world_size=SIZE, store=FakeStore())
    times = measure(arguments.rounds)
    dist.destroy_process_group()

    beyond = {name: microseconds - times["plain"] for name, microseconds in times.items()}
    with Table(arguments.output) as table:
        for name in times:
            table.write({"variant": name, "microseconds": f"{times[name]:.1f}", "beyond_plain": f"{beyond[name]:.1f}"})
            print(f"{name:10} {times[name]:8.1f} us, {beyond[name]:8.1f} beyond plain")
    ratio = beyond["dtensor"] / beyond["tp_layers"]
    print(f"DTensor's host cost is {ratio:.1f} times that of the layers, wanted: {LEAST:g}")
    sys.exit(ratio < LEAST)


if __name__ == "__main__":
    main()
