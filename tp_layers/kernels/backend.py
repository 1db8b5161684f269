"""Which implementation of an operation runs: the Triton kernel, or its twin in plain torch.

`backend` is "triton", "torch" or "auto"; None stands for the environment variable TP_LAYERS_BACKEND, and "auto" if
that is not set. "auto" takes the twin on a CPU. On CUDA it takes what `measured.FASTER` says; without an entry there,
Triton where the kernel saves a pass over memory, and the twin for a bare GEMM, which is cuBLAS's own ground.
"""

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from . import configs, measured

P = ParamSpec("P")
R = TypeVar("R")

BACKENDS = ("auto", "triton", "torch")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)

# Each operation, with the pass that its kernel saves; None for a bare GEMM.
OPERATIONS: dict[str, str | None] = {
    "rowwise": None,
    "packed_rowwise": "no cat of the inputs",
    "colwise": None,
    "packed_colwise": "activation in the epilogue, no cat of the blocks",
    "gated_colwise": "activation and product in the epilogue",
    "sum_of_squares": "one pass over the row",
    "scale": "one pass over the row",
}

# Whether fused blocks are the faster ones, by kind of device. On the CPU they take 1.00 to 1.07 times as long at widths
# of 64 to 1024 (bench/fused.py): a GEMM there does not gain from being wider, and the twins save no pass. On CUDA it is
# not measured yet; the kernels save the passes that `OPERATIONS` names.
FUSED: dict[str, bool] = {"cpu": False, "cuda": True}


class Choice(NamedTuple):
    """One row of `choices`."""

    operation: str
    shape: str
    dtype: str
    backend: str
    reason: str


def constant(function: Callable[P, R]) -> Callable[P, R]:
    """Caches a fact of the machine, which torch.compile takes as a constant and does not trace."""
    cached = functools.cache(function)

    @functools.wraps(function)
    def fact(*args: P.args, **kwargs: P.kwargs) -> R:
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    # As torch.compiler.assume_constant_result does, which would import torch._dynamo, and triton with it.
    fact._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fact


@constant
def has_triton() -> bool:
    """Whether the triton package is installed; it is not imported."""
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether kernels run on the CPU, in Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


@constant
def architecture(device: torch.device) -> str | None:
    """The entry of `configs` a device uses; None for the interpreter."""
    return configs.architecture_of(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


@functools.cache
def processors(device: torch.device) -> int:
    """How many programs of a persistent kernel a CUDA device runs at once."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def requested(backend: str | None = None) -> str:
    """`backend`, or the process-wide default.

    Raises:
        ValueError: it is none of `BACKENDS`.
    """
    name = backend or os.environ.get("TP_LAYERS_BACKEND") or "auto"
    if name not in BACKENDS:
        source = "backend" if backend else "TP_LAYERS_BACKEND"
        raise ValueError(f"{source} is {name!r}, it must be one of {', '.join(BACKENDS)}")
    return name


def automatic(architecture: str, operation: str, shape: str, dtype: str) -> tuple[str, str]:
    """What "auto" takes on a CUDA device, and why."""
    entry = measured.FASTER.get((architecture, operation, shape, dtype))
    if entry is not None:
        return entry, "measured"
    saves = OPERATIONS[operation]
    return ("triton", saves) if saves is not None else ("torch", "a bare GEMM")


def choose(operation: str, x: torch.Tensor, backend: str | None = None) -> str:
    """ "triton" or "torch" for an `operation` on `x`.

    Raises:
        ValueError: `backend` is unknown, or is "triton" for a dtype or on a device that the kernels do not run on.
    """
    name = requested(backend)
    if name == "torch":
        return name
    if name == "auto" and not x.is_cuda:
        return "torch"
    # Autocast is a property of torch's own operations: F.linear casts, a kernel would run in the tensors' dtype.
    autocast = torch.is_autocast_enabled(x.device.type)
    runs = (x.is_cuda or (interpreted() and x.device.type == "cpu")) and has_triton()
    if name == "triton":
        if x.dtype not in DTYPES:
            raise ValueError(
                f"the Triton kernels take bfloat16, float16 and float32, not {x.dtype}: use backend='torch'"
            )
        if autocast:
            raise ValueError("the Triton kernels do not autocast: cast the model instead, or use backend='torch'")
        if not runs:
            raise ValueError(
                f"the Triton kernels need the triton package ({'found' if has_triton() else 'not found'}) and a CUDA "
                f"tensor, got one on {x.device}: use backend='torch', or TRITON_INTERPRET=1 to run them on a CPU"
            )
        return name
    if not runs or autocast or x.dtype not in DTYPES:
        return "torch"
    which, dtype = architecture(x.device) or "", configs.dtype_class(x.dtype)
    found = {shape: automatic(which, operation, shape, dtype)[0] for shape in configs.SHAPE_CLASSES}
    if len(set(found.values())) == 1:
        # Without a look at the rows, or torch.compile would compile again for each shape class.
        return found["long"]
    return found[configs.shape_class(x.numel() // max(x.shape[-1], 1))]


def fuses(device: str) -> bool:
    """Whether blocks are fused by default on a kind of device: "cpu", "cuda"."""
    return FUSED.get(device, False)


def choices(architecture: str) -> list[Choice]:
    """What "auto" takes on an architecture of `configs.ARCHITECTURES`, for every operation, shape class and dtype."""
    return [
        Choice(operation, shape, dtype, *automatic(architecture, operation, shape, dtype))
        for operation in OPERATIONS
        for shape in configs.SHAPE_CLASSES
        for dtype in configs.DTYPE_CLASSES
    ]
