"""The Triton kernels against torch, layer by layer of FLUX.1, FLUX.2, Qwen-Image and Wan: `results/kernels.csv`.

Each row is one variant (see `variants.py`) of one layer on one rank, on random bfloat16 tensors: the median time of
calls from a cold L2 cache, TFLOP/s, and per cent of the roof. The roofs are measured first, in the same run: a large
product by cuBLAS and a large copy; the layer's own roof is the one that takes it longer. `error` is the distance to
the torch twin. A variant that cannot run has a note instead of a time. Rows are on disk as soon as they are measured,
the most telling layers come first, and the run stops by itself when its seconds are over.

    python bench/kernels.py [--seconds 200] [--output bench/results/kernels.csv]
    TRITON_INTERPRET=1 python bench/kernels.py --dry-run

The dry run takes each layer once, tiny and in float32 on the CPU: no figure of it is worth reading. Without the
interpreter it has the torch variants alone.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from record import RESULTS, Table
from shapes import LAYERS, Case, cases, floor
from timing import interleaved, roofs
from tp_layers.kernels import configs
from variants import Variant, compiled, distance, variants_of

# Seconds of measuring for a case: some 300 of them, and a few seconds of compiling for each new kernel.
EACH = 0.2
# Of the run's seconds: inductor takes seconds for each case, the other variants of all cases a few minutes.
COMPILING = 0.25
# Columns that a variant without a time leaves empty.
FIGURES = ("microseconds", "spread", "host_microseconds", "tflops", "gbytes_per_second", "percent_of_roof")
SHOWN = ("layer", "operation", "size", "tokens", "variant", "microseconds", "percent_of_roof", "note")


class Inductor:
    """`torch.compile`, if it works here, until its part of the run's seconds is used up."""

    def __init__(self, seconds: float, device: str) -> None:
        self.left, self.note, x = seconds, "", torch.ones(8, device=device)
        self.note = self.add({"torch": lambda: x * 2 + 1}) or self.note

    def add(self, variants: dict[str, Variant]) -> str:
        """Compiles and adds the compiled variant, or says why not."""
        if self.note:
            return self.note
        began = time.perf_counter()
        try:
            variant = compiled(variants)
            variant()
            variants["compiled"] = variant
            note = ""
        except Exception as error:
            note = reason(error)
        self.left -= time.perf_counter() - began
        if self.left < 0:
            self.note = "no time left to compile"
        return note


def reason(error: Exception) -> str:
    """An error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def measure(
    case: Case, device: str, dtype: torch.dtype, inductor: Inductor, seconds: float
) -> dict[str, dict[str, Any]]:
    """For each variant its median seconds, spread and error; or a note."""
    variants, found = variants_of(case, device, dtype), {}
    note = inductor.add(variants)
    if note:
        found["compiled"] = {"note": note}
    wanted = variants["torch"]()
    wanted = tuple(y.clone() for y in wanted) if isinstance(wanted, tuple) else wanted.clone()
    for name, variant in list(variants.items()):
        try:
            found[name] = {"error": f"{distance(variant(), wanted):.2e}"}
        except Exception as error:
            found[name] = {"note": reason(error)}
            del variants[name]
    for name, times in interleaved(variants, device, seconds).items():
        found[name] |= times._asdict()
    return found


def rows(
    case: Case, found: dict[str, dict[str, Any]], dtype: torch.dtype, roof: tuple[float, float]
) -> Iterator[dict[str, Any]]:
    """The case's rows of the table; a variant without a time has its note and empty columns."""
    least, bound = floor(case, dtype.itemsize, *roof)
    named = case._asdict() | {key: "|".join(map(str, getattr(case, key))) for key in ("depths", "widths")}
    for variant in ("triton", "torch", "separate", "compiled"):
        if variant not in found:
            continue
        row = named | {"dtype": str(dtype).removeprefix("torch."), "variant": variant} | dict.fromkeys(FIGURES, "")
        result = found[variant]
        if seconds := result.get("median"):
            row |= {
                "microseconds": f"{seconds * 1e6:.2f}",
                "spread": f"{result['spread']:.3f}",
                "host_microseconds": f"{result['host'] * 1e6:.1f}",
                "tflops": f"{case.flops / seconds / 1e12:.1f}",
                "gbytes_per_second": f"{case.nbytes(dtype.itemsize) / seconds / 1e9:.0f}",
                "percent_of_roof": f"{100 * least / seconds:.1f}",
            }
        yield row | {"roof": bound, "error": result.get("error", ""), "note": result.get("note", "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=200, help="of the whole run (default: 200)")
    parser.add_argument("--output", type=Path, default=RESULTS / "kernels.csv")
    parser.add_argument("--dry-run", action="store_true", help="each layer once, tiny, on the CPU")
    options = parser.parse_args()
    began = time.perf_counter()
    device, dtype = ("cpu", torch.float32) if options.dry_run else ("cuda", torch.bfloat16)
    architecture = "cpu" if options.dry_run else configs.architecture_of(*torch.cuda.get_device_capability())
    roof = roofs(device, dtype)
    measured = {
        "architecture": architecture,
        "matmul_tflops": f"{roof[0] / 1e12:.1f}",
        "copy_gbytes": f"{roof[1] / 1e9:.0f}",
    }
    print(*measured.values(), file=sys.stderr)
    inductor = Inductor(COMPILING * options.seconds, device)
    todo = [case.tiny() for case in cases()[: len(LAYERS)]] if options.dry_run else cases()
    with Table(options.output) as table, torch.no_grad():
        for done, case in enumerate(todo):
            if time.perf_counter() - began > options.seconds:
                print(f"{options.seconds:.0f} s are over: {done} of {len(todo)} cases", file=sys.stderr)
                break
            found = measure(case, device, dtype, inductor, 0 if options.dry_run else EACH)
            for row in rows(case, found, dtype, roof):
                table.write(row | measured)
                print(*(row[key] for key in SHOWN), file=sys.stderr)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
