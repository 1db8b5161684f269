"""The checks bite: each kernel, broken on purpose in one place, fails the check that the kernel itself passes.

A broken kernel is the kernel's own source with one text replaced. Inputs and outputs lie in frames wider than a tile,
so that a stray read is a NaN in the result, and a stray write is found.
"""

import importlib.util
import inspect
from pathlib import Path

import pytest
from kernel_checks import CHECKS

from tp_layers.kernels.jit import colwise, colwise_tma, gated, gated_tma, rms_norm, rowwise, rowwise_tma, tiles

MODULES = {
    "rowwise": rowwise,
    "rowwise_tma": rowwise_tma,
    "colwise": colwise,
    "colwise_tma": colwise_tma,
    "gated": gated,
    "gated_tma": gated_tma,
    "rms_norm": rms_norm,
}
NO_ROW_MASK = ("mask=(offs_m < M)[:, None] & ", "mask=(offs_m >= 0)[:, None] & ")
NO_COLUMN_MASK = ("& (offs_n < N)[None, :])", "& (offs_n >= 0)[None, :])")
# What is wrong -> the file it is wrong in, the text there, and what replaces it.
BROKEN = {
    "rowwise": {
        "bias dropped": ("rowwise", "if b_ptr is not None:", "if False:"),
        "column offset ignored": ("rowwise", "(columns[i] + offs_k)", "offs_k"),
        "column offset of the first input for all": ("rowwise", "columns[i]", "columns[0]"),
        "first input for all": ("rowwise", "x_ptrs[i] +", "x_ptrs[0] +"),
        "depth of the first input for all": ("rowwise", "Ks[i]", "Ks[0]"),
        "step of the first input for all": ("rowwise", "Ks[i], strides_xk[i]", "Ks[i], strides_xk[0]"),
        "strides of x swapped": (
            "rowwise",
            "rows * strides_xm[i] + offs_k[None, :] * strides_xk[i]",
            "rows * strides_xk[i] + offs_k[None, :] * strides_xm[i]",
        ),
        "strides of the weight swapped": ("rowwise", "[None, :] * stride_wn", "[None, :] * stride_wk"),
        "strides of y swapped": (
            "rowwise",
            "stride_ym + offs_n[None, :] * stride_yn",
            "stride_yn + offs_n[None, :] * stride_ym",
        ),
        "no row mask": ("rowwise", *NO_ROW_MASK),
        "no column mask": ("rowwise", *NO_COLUMN_MASK),
        "no depth mask": ("tiles", "< K - k * BLOCK_K", "< BLOCK_K"),
        "last step left out": ("tiles", "tl.cdiv(K, BLOCK_K)", "K // BLOCK_K"),
        "x stays at the first step": ("tiles", "x_ptrs += BLOCK_K * stride_xk", "x_ptrs += 0"),
        "second group of tiles is the first": ("tiles", "return first + pid", "return pid"),
        "last group as large as the others": ("tiles", "tl.minimum(m_tiles - first, GROUP_M)", "GROUP_M"),
        "sum started anew at each input": ("rowwise", "acc = accumulate(acc,", "acc = accumulate(acc * 0,"),
        "sum rounded between the inputs": (
            "rowwise",
            "acc = accumulate(acc, x, w,",
            "acc = accumulate(acc.to(tl.float16).to(tl.float32), x, w,",
        ),
    },
    "rowwise_tma": {
        "bias dropped": ("rowwise_tma", "if b_ptr is not None:", "if False:"),
        "column offset ignored": ("rowwise_tma", "column + k", "k"),
        "column offset of the first input for both": ("rowwise_tma", "second_K, second_column,", "second_K, column,"),
        "depth of the first input for both": ("rowwise_tma", "second_K, second_column,", "K, second_column,"),
        "second input left out": ("rowwise_tma", "if second_desc is not None:", "if False:"),
        "only the first tile of a program": ("rowwise_tma", "tl.cdiv(M, BLOCK_M) * n_tiles, tl", "4, tl"),
        "rows of x for the weight": ("rowwise_tma", "w_desc.load([w_row,", "w_desc.load([row,"),
        "strides of y swapped": (
            "rowwise_tma",
            "stride_ym + offs_n[None, :] * stride_yn",
            "stride_yn + offs_n[None, :] * stride_ym",
        ),
        "no row mask": ("rowwise_tma", *NO_ROW_MASK),
        "no column mask": ("rowwise_tma", *NO_COLUMN_MASK),
    },
    "colwise": {
        "bias dropped": ("colwise", "if b_ptr is not None:", "if False:"),
        "bias of the first rows": ("colwise", "b_ptr + start + offs_n", "b_ptr + offs_n"),
        "block offset ignored": ("colwise", "(start + offs_n % N)", "(offs_n % N)"),
        "block starts where the one before does": ("colwise", "inside, starts[i]", "inside, starts[i - 1]"),
        "width of the first block": ("colwise", "inside, widths[i]", "inside, widths[0]"),
        "output of the first block": ("colwise", "inside, y_ptrs[i]", "inside, y_ptrs[0]"),
        "row stride of the first block": ("colwise", "inside, strides_ym[i]", "inside, strides_ym[0]"),
        "tile counted from the first block": ("colwise", "(pid_n - first)", "pid_n"),
        "every activation on every block": ("colwise", "if block == i:", "if True:"),
        "no activation": ("colwise", "if block == i:", "if False:"),
        "strides of x swapped": (
            "colwise",
            "stride_xm + offs_k[None, :] * stride_xk",
            "stride_xk + offs_k[None, :] * stride_xm",
        ),
        "no row mask": ("colwise", *NO_ROW_MASK),
        "no column mask": ("colwise", *NO_COLUMN_MASK),
        "cubic term of the tanh GELU": ("tiles", "0.044715", "0.04"),
        "scale of the tanh GELU": ("tiles", "1.5957691216057308", "1.702"),
        "scale of the erf": ("tiles", "0.7071067811865476", "0.70"),
        "SiLU without its factor": ("tiles", "y = y * tl.sigmoid(y)", "y = tl.sigmoid(y)"),
    },
    "gated": {
        "bias dropped": ("gated", "if b_ptr is not None:", "if False:"),
        "bias of the gate for both": ("gated", "b_ptr + up + offs_n", "b_ptr + gate + offs_n"),
        "gate and up exchanged": (
            "gated",
            "activate(gate_acc, ACTIVATION) * up_acc",
            "activate(up_acc, ACTIVATION) * gate_acc",
        ),
        "no activation": ("gated", "activate(gate_acc, ACTIVATION)", "gate_acc"),
        "gate offset ignored": ("gated", "(gate + offs_n % N)", "(offs_n % N)"),
        "up offset ignored": ("gated", "(up + offs_n % N)", "(offs_n % N)"),
        "up stays at the first step": ("gated", "up_ptrs += BLOCK_K * stride_wk", "up_ptrs += 0"),
        "one sum for both": ("gated", "up_acc = tl.dot(x, w_up,", "up_acc = tl.dot(x, w_gate,"),
        "no depth mask": ("gated", "< left", "< BLOCK_K"),
        "strides of y swapped": (
            "gated",
            "stride_ym + offs_n[None, :] * stride_yn",
            "stride_yn + offs_n[None, :] * stride_ym",
        ),
        "no row mask": ("gated", *NO_ROW_MASK),
        "no column mask": ("gated", *NO_COLUMN_MASK),
    },
    "colwise_tma": {
        "bias dropped": ("colwise_tma", "if b_ptr is not None:", "if False:"),
        "bias of the first rows": ("colwise_tma", "b_ptr + start + offs_n", "b_ptr + offs_n"),
        "block offset ignored": ("colwise_tma", "row, start + column,", "row, column,"),
        "tile counted from the first block": ("colwise_tma", "(pid_n - first)", "pid_n"),
        "no activation": ("colwise_tma", "acc = activate_block(acc, block, ACTIVATIONS)", "pass"),
        "only the first tile of a program": ("colwise_tma", "tl.cdiv(M, BLOCK_M) * n_tiles, tl", "4, tl"),
        "no row mask": ("colwise_tma", *NO_ROW_MASK),
        "no column mask": ("colwise_tma", *NO_COLUMN_MASK),
    },
    "gated_tma": {
        "bias dropped": ("gated_tma", "if b_ptr is not None:", "if False:"),
        "bias of the gate for both": ("gated_tma", "b_ptr + up + offs_n", "b_ptr + gate + offs_n"),
        "gate and up exchanged": (
            "gated_tma",
            "activate(gate_acc, ACTIVATION) * up_acc",
            "activate(up_acc, ACTIVATION) * gate_acc",
        ),
        "up offset ignored": ("gated_tma", "[up + column, k]", "[column, k]"),
        "first step for up": ("gated_tma", "[up + column, k]", "[up + column, 0]"),
        "only the first tile of a program": ("gated_tma", "tl.cdiv(M, BLOCK_M) * n_tiles, tl", "4, tl"),
        "no row mask": ("gated_tma", *NO_ROW_MASK),
        "no column mask": ("gated_tma", *NO_COLUMN_MASK),
    },
    "rms_norm": {
        "sum without a mask": ("rms_norm", "mask=d + offs_d < D, other", "mask=offs_d >= 0, other"),
        "only the last step summed": ("rms_norm", "acc += x * x", "acc = x * x"),
        "row stride ignored": ("rms_norm", "row * stride_xm", "row * D"),
        "squares of the first row": ("rms_norm", "tl.load(squares_ptr + row)", "tl.load(squares_ptr)"),
        "mean over the local channels": ("rms_norm", "/ width", "/ D"),
        "eps dropped": ("rms_norm", " + eps)", ")"),
        "weight dropped": ("rms_norm", "if w_ptr is not None:", "if False:"),
        "bias dropped": ("rms_norm", "if b_ptr is not None:", "if False:"),
        "parameters of the first step": ("rms_norm", "w_ptr + d + offs_d", "w_ptr + offs_d"),
        "rounded only at the end": ("rms_norm", "if ROUND_FIRST:", "if False:"),
        "no mask": ("rms_norm", "mask = d + offs_d < D", "mask = offs_d >= 0"),
    },
}


def load(name: str, source: str, folder: Path):
    """A module of the kernels' package from this source; Triton reads it back from the file."""
    path = folder / f"{name}.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(f"tp_layers.kernels.jit.broken_{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def broken(operation: str, file: str, text: str, replacement: str, folder: Path):
    """The operation's module with one text replaced, in it or in what it takes from `tiles`."""
    source = inspect.getsource(MODULES[operation])
    if file != "tiles":
        assert text in source
        return load(operation, source.replace(text, replacement), folder)
    shared = inspect.getsource(tiles)
    assert text in shared
    module, changed = load(operation, source, folder), load("tiles", shared.replace(text, replacement), folder)
    for name in ("accumulate", "activate", "tile_of"):
        if hasattr(module, name):
            setattr(module, name, getattr(changed, name))
    return module


@pytest.mark.parametrize("operation", CHECKS)
def test_the_kernel_itself_passes(operation):
    CHECKS[operation](MODULES[operation])


@pytest.mark.parametrize(
    ("operation", "fault"), [(operation, fault) for operation, faults in BROKEN.items() for fault in faults]
)
def test_a_broken_kernel_is_caught(operation, fault, tmp_path):
    module = broken(operation, *BROKEN[operation][fault], tmp_path)
    with pytest.raises(AssertionError, match=r"off by|written outside"):
        CHECKS[operation](module)
