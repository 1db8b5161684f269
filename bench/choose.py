"""Writes `tp_layers/kernels/measured.py`, what `backend="auto"` takes, from the tables of `kernels.py`.

Of a class of shapes, the kernel is taken if its geometric mean over all measured layers is below the torch twin's,
and it is nowhere slower by more than the tolerance, with a result as close to the twin's as rounding allows. The
twin is taken otherwise. Classes without a measurement are left to `backend.automatic`.

    python bench/choose.py bench/results/kernels.csv [MORE.csv ...] [--output FILE] [--tolerance 0.02]

Give it the tables of all machines at once: the file is written anew.
"""

import argparse
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from record import RESULTS, read
from tp_layers.kernels import configs, measured

Key = tuple[str, str, str, str]
# A rounding to bfloat16 moves a value by 2e-3 of it at most, and the twin rounds up to three times.
WRONG = 1e-2

TEMPLATE = '''\
"""Which backend was the faster one on a GPU: written by bench/choose.py from measurements, read by `backend.choose`.

Keys are (architecture, operation, shape class, dtype class) as in `configs.py` and `backend.OPERATIONS`, values are
"triton" or "torch". Beside each, the torch twin's time over the kernel's: their mean, and the least of them.
{source}"""

FASTER: dict[tuple[str, str, str, str], str] = {entries}
'''


class Verdict(NamedTuple):
    """The choice for a class of shapes: the twin's time over the kernel's, on average and at the least."""

    backend: str
    mean: float
    least: float
    layers: int


def speedups(rows: Iterable[dict[str, str]]) -> dict[Key, list[float]]:
    """The twin's time over the kernel's for every layer that has both; 0 where the kernel failed or was wrong."""
    layers: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in rows:
        if row["architecture"] in configs.ARCHITECTURES:
            which = "architecture", "operation", "tokens", "dtype", "machine", "model", "layer", "size"
            layers.setdefault(tuple(row[key] for key in which), {})[row["variant"]] = row
    found: dict[Key, list[float]] = {}
    for (architecture, operation, tokens, dtype, *_), variants in layers.items():
        if not {"triton", "torch"} <= set(variants) or not variants["torch"]["microseconds"]:
            continue
        shape, kind = configs.shape_class(int(tokens)), configs.dtype_class(getattr(torch, dtype))
        kernel, twin = variants["triton"], float(variants["torch"]["microseconds"])
        # A NaN is not right.
        right = kernel["microseconds"] and float(kernel["error"]) < WRONG
        ratio = twin / float(kernel["microseconds"]) if right else 0.0
        found.setdefault((architecture, operation, shape, kind), []).append(ratio)
    return found


def verdict(ratios: list[float], tolerance: float) -> Verdict:
    """The kernel, if it wins on average and loses nowhere."""
    least = min(ratios)
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios)) if least > 0 else 0.0
    return Verdict("triton" if mean > 1 and least >= 1 - tolerance else "torch", mean, least, len(ratios))


def written(verdicts: dict[Key, Verdict], source: str) -> str:
    """The text of `measured.py`."""
    lines = []
    for key, found in sorted(verdicts.items()):
        place = ", ".join(f'"{part}"' for part in key)
        lines.append(f'    ({place}): "{found.backend}",  # {found.mean:.2f}, {found.least:.2f} of {found.layers}\n')
    entries = "{\n" + "".join(lines) + "}" if lines else "{}"
    return TEMPLATE.format(source=source, entries=entries)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", type=Path, default=[RESULTS / "kernels.csv"])
    parser.add_argument("--output", type=Path, default=Path(measured.__file__))
    parser.add_argument("--tolerance", type=float, default=0.02, help="of what counts as slower (default: 0.02)")
    options = parser.parse_args(arguments)
    rows = read(options.tables)
    verdicts = {key: verdict(ratios, options.tolerance) for key, ratios in speedups(rows).items()}
    used = [row for row in rows if row["architecture"] in configs.ARCHITECTURES]
    sources = dict.fromkeys(
        f"{row['machine']}, torch {row['torch']}, triton {row['triton']}, commit {row['commit']}" for row in used
    )
    text = "".join(f"\nMeasured on {source}.\n" for source in sources) or "Empty until measured.\n"
    options.output.write_text(written(verdicts, text))
    for key, found in sorted(verdicts.items()):
        print(*key, found.backend, f"{found.mean:.2f} at least {found.least:.2f} over {found.layers} layers")


if __name__ == "__main__":
    main()
