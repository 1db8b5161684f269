"""How fast shards reach a CUDA device, against safetensors' own load to it and a pinned copy: `results/load_cuda.csv`.

One rank's shards of a file of FLUX.2's shapes in bfloat16, from the page cache, at sizes 1 and 4, in turn, medians.

    pinned copy    as many bytes from pinned memory to the device: the roof
    safetensors    `load_file(device=)` at size 1, a slice of each tensor at size 4
    tp_layers      this package's reader, into tensors that are there

    python bench/load_cuda.py [--output bench/results/load_cuda.csv] [--dry-run]

A dry run moves little, on the CPU. Exits with 1 if a shard is wrong.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from record import RESULTS, Table
from tp_layers.loader.index import read_header
from tp_layers.loader.parts import parts_of
from tp_layers.loader.read import Job, read_shards
from tp_layers.plans.spec import ShardSpec

WIDTH = 6144
# Rows, columns, the dim that is cut and its blocks, of one FLUX.2 block of each kind.
SHAPES = {
    "to_q": (WIDTH, WIDTH, 0, [1]),
    "to_out": (WIDTH, WIDTH, 1, [1]),
    "ff_in": (6 * WIDTH, WIDTH, 0, [1, 1]),
    "ff_out": (WIDTH, 3 * WIDTH, 1, [1]),
    "to_qkv_mlp": (9 * WIDTH, WIDTH, 0, [1, 1, 1, 3, 3]),
    "single_out": (WIDTH, 4 * WIDTH, 1, [1, 3]),
}
ROUNDS = 5
PINNED_BYTES = 64 << 20


def specs(scale: int) -> dict[str, tuple[tuple[int, int], ShardSpec]]:
    """Shape and cut of each tensor, `scale` times narrower."""
    made = {}
    for name, (rows, columns, dim, blocks) in SHAPES.items():
        shape = rows // scale, columns // scale
        made[name] = (shape, ShardSpec.of(dim, shape[dim], blocks))
    return made


def variants(
    file: Path, cuts: dict[str, tuple[tuple[int, int], ShardSpec]], size: int, device: str
) -> tuple[dict[str, Callable[[], dict[str, torch.Tensor]]], int]:
    """Each way to get rank 0's shards onto the device, and their bytes."""
    entries = read_header(file)
    targets = {
        name: torch.empty(spec.local_shape(shape, 0, size), dtype=torch.bfloat16, device=device)
        for name, (shape, spec) in cuts.items()
    }
    jobs = [
        Job(name, part, targets[name])
        for name in sorted(entries, key=lambda name: entries[name].offset)
        for part in parts_of(entries[name], cuts[name][1], 0, size)
    ]
    total = sum(target.nbytes for target in targets.values())
    pinned = torch.empty(min(PINNED_BYTES, total), dtype=torch.uint8, pin_memory=device == "cuda")
    landing = torch.empty_like(pinned, device=device, pin_memory=False)

    def copy() -> dict[str, torch.Tensor]:
        for start in range(0, total, pinned.numel()):
            part = slice(min(pinned.numel(), total - start))
            landing[part].copy_(pinned[part], non_blocking=True)
        return {}

    def peer() -> dict[str, torch.Tensor]:
        if size == 1:
            return load_file(file, device=device)
        with safe_open(file, framework="pt", device=device) as opened:
            found = {}
            for name, (_, spec) in cuts.items():
                lines = opened.get_slice(name)
                ranges = [(start, stop) for start, stop, _ in spec.ranges(0, size)]
                pieces = [lines[a:b] if spec.dim == 0 else lines[:, a:b] for a, b in ranges]
                found[name] = torch.cat(pieces, spec.dim).contiguous()
        return found

    def ours() -> dict[str, torch.Tensor]:
        read_shards(jobs, 0)
        return targets

    return {"pinned copy": copy, "safetensors": peer, "tp_layers": ours}, total


def timed(function: Callable[[], dict[str, torch.Tensor]], device: str) -> float:
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=RESULTS / "load_cuda.csv")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    device = "cpu" if options.dry_run else "cuda"
    cuts = specs(32 if options.dry_run else 1)
    wrong = False
    with tempfile.TemporaryDirectory() as folder, Table(options.output) as table:
        file = Path(folder) / "shapes.safetensors"
        # Drawn on a CPU they would take half a minute.
        drawn = {name: torch.randn(shape, dtype=torch.bfloat16, device=device) for name, (shape, _) in cuts.items()}
        save_file({name: tensor.cpu() for name, tensor in drawn.items()}, file)
        del drawn
        for size in (1, 4):
            ways, total = variants(file, cuts, size, device)
            theirs, mine = ways["safetensors"](), ways["tp_layers"]()
            wrong |= not all(torch.equal(theirs[name], mine[name]) for name in cuts)
            del theirs
            times: dict[str, list[float]] = {name: [] for name in ways}
            for _ in range(1 if options.dry_run else ROUNDS):
                for name, function in ways.items():
                    times[name].append(timed(function, device))
            for name, seconds in times.items():
                median = statistics.median(seconds)
                table.write({"size": size, "way": name, "mb": round(total / 1e6, 1), "seconds": f"{median:.4f}"})
                print(f"size {size}  {name:12} {median:8.4f} s  {total / median / 1e9:6.2f} GB/s", flush=True)
    print("wrong" if wrong else "every shard is right")
    sys.exit(wrong)


if __name__ == "__main__":
    main()
