"""How fast a sharded checkpoint is read, and in how much memory, against what bounds it: `results/load.csv`.

On CPU ranks of this machine, in turn in one run, medians over rounds; each time is that of the slowest rank. The
checkpoint is a FLUX.2 klein (9B) of few blocks in bfloat16, made on first use in a scratch folder (2.5 GB).

    in place   `reload` against a memcpy of the same bytes, and diffusers' sharded load and a copy to the same place
    fresh      `load` against diffusers' sharded load (which leaves colwise weights mapped to the file, so every page is
               looked at), and against the full model in every rank's memory and `apply`
    cold       the same without the page cache, against reading the files once in order

Exits with 1 if a bound is missed. It needs `pip install '.[bench]'`.

    python bench/load.py [--sizes 2 4] [--rounds 5] [--folder /tmp/tp_layers_bench] [--output bench/results/load.csv]
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel

import load_ways
import tp_layers
from record import RESULTS, Table
from tp_layers.group import Group
from tp_layers.launch import Ranks
from tp_layers.loader.report import LoadReport

# As FLUX.2 klein of 9B parameters, which has 8 and 24 blocks.
CONFIG = {"num_attention_heads": 32, "joint_attention_dim": 12288, "num_layers": 1, "num_single_layers": 2}
MIB = 1 << 20
# (measure, what is bound, against what, at most how many times)
BOUNDS = [
    ("in place", "reload", "memcpy", 2.0),
    ("in place", "reload", "diffusers, copied on", 0.35),
    ("fresh", "load", "diffusers", 1.3),
    ("fresh", "load", "full, then apply", 0.5),
    ("cold", "load", "sequential read", 1.15),
    ("cold", "load", "diffusers", 0.5),
]
PEAK_MIB = 64
DISK = 1.05
COLUMNS = ["measure", "size", "way", "seconds", "held_mb", "requested_mb", "disk_mb", "beyond_shard_mib", "figure"]
COLUMNS += ["most"]


def make(folder: Path) -> Path:
    """The checkpoint, of small random weights; made anew if the one there is of another config."""
    file = folder / "config.json"
    found = json.loads(file.read_text()) if file.is_file() else {}
    if {key: found.get(key) for key in CONFIG} != CONFIG:
        print(f"making the checkpoint in {folder}")
        with torch.device("meta"):
            model = Flux2Transformer2DModel(**CONFIG).to(torch.bfloat16)
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.detach().uniform_(-0.02, 0.02)
        shutil.rmtree(folder, ignore_errors=True)
        model.save_pretrained(folder, max_shard_size="500MB")
    return folder


def measure(ranks: Ranks, size: int, folder: Path, rounds: int) -> list[dict[str, Any]]:
    """One row for each measure and way: the slowest rank's median seconds, and what else was seen."""
    rows = []
    reports: list[LoadReport] = ranks.run(load_ways.keep, folder, size=size)
    for name in ("in place", "fresh", "cold"):
        if name == "fresh":
            ranks.run(load_ways.forget, size=size)
        ways = list(dict.fromkeys(way for measured, *pair, _ in BOUNDS if measured == name for way in pair))
        seen: dict[str, list[list[dict[str, float]]]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way in ways:
                result = ranks.run(load_ways.timed, way, folder, name == "cold", size=size)
                if number or name == "cold":
                    seen[way].append(result)
        if name == "in place":
            ranks.run(load_ways.timed, "reload", folder, False, size=size)
            assert all(ranks.run(load_ways.is_right, folder, size=size))
        for way in ways:
            rows.append(row(name, size, way, seen[way], reports))
            print(*(f"{value}" for value in rows[-1].values()), sep="  ", flush=True)
    return rows


def row(
    name: str, size: int, way: str, seen: list[list[dict[str, float]]], reports: list[LoadReport]
) -> dict[str, Any]:
    pairs = [pair for result in seen for pair in zip(result, reports, strict=True)]
    beyond = [rank["peak"] - (0 if name == "in place" else report.bytes_held) for rank, report in pairs]
    slowest = [max(rank["seconds"] for rank in result) for result in seen]
    return {
        "measure": name,
        "size": size,
        "way": way,
        "seconds": round(statistics.median(slowest), 4),
        "held_mb": round(max(report.bytes_held for report in reports) / 1e6, 1),
        "requested_mb": round(max(report.bytes_read for report in reports) / 1e6, 1),
        "disk_mb": round(statistics.median(sum(rank["disk"] for rank in result) for result in seen) / 1e6, 1),
        "beyond_shard_mib": round(max(beyond) / MIB, 1),
    }


def bounds(rows: list[dict[str, Any]], total: int) -> list[tuple[str, float, float]]:
    """What is bound, as (name, figure, bound)."""
    of = {(it["measure"], it["way"]): it for it in rows}
    found = [
        (f"{name}: {way} / {against}", of[name, way]["seconds"] / of[name, against]["seconds"], most)
        for name, way, against, most in BOUNDS
    ]
    found.append(("cold: disk / files", of["cold", "load"]["disk_mb"] * 1e6 / total, DISK))
    found.append(("fresh: peak beyond the shard, MiB", of["fresh", "load"]["beyond_shard_mib"], PEAK_MIB))
    return found


def shares(folder: Path) -> list[dict[str, Any]]:
    """What a rank holds and requests at each size, the ranks one after another, none of them in memory."""
    rows = []
    for size in (1, 2, 4, 8):
        reports = []
        for rank in range(size):
            group = Group(rank, size)
            _, report = tp_layers.load(Flux2Transformer2DModel, folder, group=group, device="meta", report=True)
            reports.append(report)
        held, requested = (max(getattr(it, name) for it in reports) / 1e6 for name in ("bytes_held", "bytes_read"))
        rows.append({"measure": "shares", "size": size, "way": "load", "held_mb": held, "requested_mb": requested})
        print(f"at size {size} a rank holds {held:,.1f} MB and requests {requested:,.1f} MB", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "tp_layers_bench")
    parser.add_argument("--output", type=Path, default=RESULTS / "load.csv")
    options = parser.parse_args()
    folder = make(options.folder)
    total = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    missed = False
    with Table(options.output) as table:
        for size in options.sizes:
            with Ranks(size, timeout=900) as ranks:
                rows = measure(ranks, size, folder, options.rounds)
            for name, figure, most in bounds(rows, total):
                missed |= figure > most
                print(f"size {size}, {name}: {figure:.2f}, at most {most:g}{'  MISSED' if figure > most else ''}")
                rows.append({"measure": "bound", "size": size, "way": name, "figure": round(figure, 3), "most": most})
            for it in rows:
                table.write(dict.fromkeys(COLUMNS, "") | it)
        for it in shares(folder):
            table.write(dict.fromkeys(COLUMNS, "") | it)
    sys.exit(missed)


if __name__ == "__main__":
    main()
