"""What the compiler makes of every shipped configuration, without a GPU or a driver: `results/aot.csv`.

Each entry of `tp_layers.kernels.configs` is compiled for its architecture, as the launch of a typical layer with
bias: the packed rowwise sum of two inputs, a packed colwise projection of four blocks with a GELU, a gated projection,
the two norm kernels. Its registers and spills are ptxas's own report, its shared memory is Triton's, its
instructions are counted in nvdisasm's listing.

    python bench/aot.py [--architecture sm_90 ...] [--output bench/results/aot.csv] [--append]
"""

import argparse
import collections
import contextlib
import io
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from record import RESULTS, Table
from tp_layers.kernels import configs
from tp_layers.kernels.jit.colwise import colwise_launch
from tp_layers.kernels.jit.colwise_tma import colwise_tma_launch
from tp_layers.kernels.jit.gated import gated_launch
from tp_layers.kernels.jit.gated_tma import gated_tma_launch
from tp_layers.kernels.jit.launch import Launch
from tp_layers.kernels.jit.rms_norm import scale_launch, sum_of_squares_launch
from tp_layers.kernels.jit.rowwise import rowwise_launch
from tp_layers.kernels.jit.rowwise_tma import rowwise_tma_launch

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
TYPES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
# Bytes of shared memory one block may have. More than that compiles, and fails at launch.
SHARED = {"sm_80": 166_912, "sm_86": 101_376, "sm_90": 232_448, "sm_100": 232_448}
ROWS = {"few": 8, "short": 512, "long": 4608}
# The tensor cores' instructions, from sm_80's and sm_90's to sm_100's.
TENSOR_CORES = ("HMMA", "HGMMA", "UTCHMMA")

# What else decides how a rowwise sum is compiled: loops of one input may be flattened, and a wide sum is stored from
# more memory.
ONE_INPUT, WIDE_SUM = "one input", "float32 sum"
VARIANTS = (ONE_INPUT, WIDE_SUM, f"{ONE_INPUT}, {WIDE_SUM}")

POINTERS = {"rowwise": rowwise_launch, "colwise": colwise_launch, "gated": gated_launch}
TMA = {"rowwise": rowwise_tma_launch, "colwise": colwise_tma_launch, "gated": gated_tma_launch}


class Case(NamedTuple):
    """One compilation. `even` says whether K is a multiple of the step along K: if not, the loads have masks.

    `variant`: of `VARIANTS`, how the launch of a rowwise sum differs from the typical one.
    """

    architecture: str
    operation: str
    shape: str
    dtype: str
    even: bool
    variant: str = ""

    def __str__(self) -> str:
        return "-".join(filter(None, [*self[:4], "even" if self.even else "ragged", self.variant]))


class Compiled(NamedTuple):
    """What came out of one compilation."""

    registers: int
    spills: int
    shared: int
    tensor_cores: int
    async_copies: int
    tma: int
    serialised: bool


def cases(
    architectures: tuple[str, ...] = configs.ARCHITECTURES, dtypes: tuple[str, ...] = tuple(DTYPES)
) -> list[Case]:
    """Every shipped configuration of these architectures."""
    gemms = [
        Case(architecture, operation, shape, dtype, even)
        for architecture in architectures
        for operation in configs.GEMMS
        for shape in configs.SHAPE_CLASSES
        for dtype in dtypes
        for even in (True, False)
    ]
    # Only whole steps along K go through TMA.
    descriptors = [
        Case(architecture, f"{operation}_tma", shape, dtype, True)
        for architecture, operation, shape, _ in configs.TMA_TILES
        for dtype in dtypes
        if architecture in architectures and dtype != "float32"
    ]
    variants = [
        case._replace(variant=variant)
        for case in gemms + descriptors
        for variant in VARIANTS
        if case.operation.startswith("rowwise") and case.dtype != "float32" and case.even
    ]
    norms = [
        Case(architecture, operation, "long", dtype, True)
        for architecture in architectures
        for operation in configs.NORMS
        for dtype in dtypes
    ]
    return gemms + descriptors + variants + norms


def launch_of(case: Case) -> Launch:
    """The launch a layer would make, on tensors without storage."""
    dtype, rows = DTYPES[case.dtype], ROWS[case.shape]
    # A multiple of 16 keeps the vector loads that every real width has.
    depth = 3072 if case.even else 3072 + 16

    def new(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    if case.operation in configs.NORMS:
        x, squares, step = new(rows, depth), new(rows).float(), configs.row_for(case.architecture, case.operation)
        if case.operation == "sum_of_squares":
            return sum_of_squares_launch(x, squares, step)
        return scale_launch(x, squares, new(depth), None, new(rows, depth), 2 * depth, 1e-6, False, step)
    operation = case.operation.removesuffix("_tma")
    if operation == "rowwise":
        xs, columns = [new(rows, depth), new(rows, 4 * depth)], [0, depth]
        if ONE_INPUT in case.variant:
            xs, columns = [new(rows, 5 * depth)], [0]
        y = new(rows, 3072)
        arguments = xs, new(3072, 5 * depth), new(3072), y.float() if WIDE_SUM in case.variant else y, columns
    elif operation == "colwise":
        widths = [1024, 1024, 1024, 4096]
        ys, starts = [new(rows, width) for width in widths], [sum(widths[:i]) for i in range(len(widths))]
        activations = [None, None, None, "gelu_tanh"]
        arguments = new(rows, depth), new(sum(widths), depth), new(sum(widths)), ys, starts, activations
    else:
        arguments = new(rows, depth), new(2 * 4096, depth), new(2 * 4096), new(rows, 4096), 0, 4096, "silu"
    which = case.architecture, operation, rows, dtype
    if operation == case.operation:
        return POINTERS[operation](*arguments, configs.tile_for(*which))
    wide = torch.float32 if WIDE_SUM in case.variant else None
    return TMA[operation](*arguments, configs.tma_tile_for(*which, wide), programs=132)


def source_of(launch: Launch) -> ASTSource:
    """The kernel with the types and hints that a launch on 16-byte aligned tensors would give it."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list[list[Any]]] = {}

    def type_of(value: Any, path: tuple[int, ...], specialise: bool) -> Any:
        if isinstance(value, tuple):
            return tuple(type_of(part, (*path, at), specialise) for at, part in enumerate(value))
        if isinstance(value, float):
            return "fp32"
        if isinstance(value, TensorDescriptor):
            return f"tensordesc<{TYPES[value.base.dtype][1:]}{list(value.block_shape)}>"
        if isinstance(value, torch.Tensor) or (specialise and value is not None and value != 1 and value % 16 == 0):
            hints[path] = [["tt.divisibility", 16]]
        if isinstance(value, torch.Tensor):
            return TYPES[value.dtype]
        if value is None or (specialise and value == 1):
            constants[path] = value
            return "constexpr"
        return "i32" if value < 2**31 else "i64"

    for at, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(at,)] = "constexpr", value
        else:
            signature[parameter.name] = type_of(value, (at,), not parameter.do_not_specialize)
    return ASTSource(launch.kernel, signature, constants, hints)


def compile_for(launch: Launch, architecture: str) -> Compiled:
    """Compiles a launch, and reads what came out."""
    target = GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    log = io.StringIO()
    with knobs.nvidia.scope(), knobs.compilation.scope(), contextlib.redirect_stdout(log):
        # A cached binary has no log.
        knobs.nvidia.dump_ptxas_log, knobs.compilation.always_compile = True, True
        kernel = triton.compile(source_of(launch), target=target, options=launch.options)
    report = log.getvalue()
    counts = instructions(kernel.asm["cubin"])
    return Compiled(
        registers=max(int(count) for count in re.findall(r"Used (\d+) registers", report)),
        spills=sum(int(count) for count in re.findall(r"(\d+) bytes spill", report)),
        shared=kernel.metadata.shared,
        tensor_cores=sum(counts[name] for name in TENSOR_CORES),
        async_copies=counts["LDGSTS"],
        tma=counts["UTMALDG"],
        serialised="C7515" in report or "serialized" in report,
    )


def instructions(cubin: bytes) -> collections.Counter[str]:
    """How often each instruction, without its modifiers, stands in a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        listing = subprocess.run(
            [knobs.nvidia.nvdisasm.path, "-c", file.name], check=True, capture_output=True, text=True
        ).stdout
    return collections.Counter(re.findall(r"\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9]+)", listing))


def rows_of(chosen: list[Case]) -> Iterator[dict[str, Any]]:
    """One row of the table for each case."""
    for case in chosen:
        launch = launch_of(case)
        tile = "x".join(str(value) for key, value in launch.arguments.items() if key.startswith("BLOCK_"))
        options = {"num_warps": launch.options["num_warps"], "num_stages": launch.options.get("num_stages", "")}
        result = compile_for(launch, case.architecture)._asdict()
        yield case._asdict() | {"tile": tile} | options | result | {"limit": SHARED[case.architecture]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--architecture", nargs="+", choices=configs.ARCHITECTURES, default=configs.ARCHITECTURES)
    parser.add_argument("--output", type=Path, default=RESULTS / "aot.csv")
    parser.add_argument("--append", action="store_true", help="keep the rows that are there, as of another triton")
    arguments = parser.parse_args()
    with Table(arguments.output, arguments.append) as table:
        for row in rows_of(cases(tuple(arguments.architecture))):
            table.write(row)
            print(*row.values(), file=sys.stderr)


if __name__ == "__main__":
    main()
