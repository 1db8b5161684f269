"""The checks bite: each kernel, broken on purpose in one place, fails the check that the kernel itself passes.

A broken kernel is the kernel's own source with one text replaced. Inputs and outputs lie in frames wider than a tile,
so that a stray read is a NaN in the result, and a stray write is found.
"""

import importlib.util
import inspect
from functools import partial
from pathlib import Path

import pytest
import torch
from rule import check, draw, framed, surrounded

from tp_layers.kernels import configs
from tp_layers.kernels.colwise import ACTIVATIONS
from tp_layers.kernels.jit import colwise, colwise_tma, gated, gated_tma, rms_norm, rowwise, rowwise_tma, tiles

TILE, STEP, DTYPE = configs.INTERPRETED, configs.INTERPRETED_ROW, torch.float32
# Three tiles along the rows in groups of two, no extent a multiple of a tile's.
ROWS = 70
NAN = float("nan")


def output(*shape, dtype=DTYPE):
    return framed(torch.full(shape, NAN, dtype=dtype))


def inputs(width, depth):
    weight, bias = draw(width, depth, dtype=DTYPE, seed=2), draw(width, dtype=DTYPE, seed=3)
    return draw(ROWS, depth, dtype=DTYPE), weight, bias


def verify(got, own, exact):
    check(got, own, exact)
    assert surrounded(got), "written outside the result"


def check_rowwise(module):
    """Two inputs, the first one transposed, that meet the columns of a wider weight out of turn."""
    xs = [draw(33, ROWS, dtype=DTYPE).t(), draw(ROWS, 40, dtype=DTYPE, seed=1)]
    weight, bias = draw(70, 90, dtype=DTYPE, seed=2), draw(70, dtype=DTYPE, seed=3)
    y = output(ROWS, 70)
    module.rowwise_launch(xs, weight, bias, y, [50, 5], TILE).run(y.device)

    def twin(first, second, weight, bias):
        return first @ weight[:, 50:83].t() + second @ weight[:, 5:45].t() + bias

    tensors = [*xs, weight, bias]
    verify(y, twin(*tensors), twin(*(tensor.double() for tensor in tensors)))


def check_rowwise_tma(module):
    """Two inputs that meet the columns of a wider weight out of turn, on fewer programs than there are tiles."""
    xs = [draw(ROWS, 32, dtype=DTYPE), draw(ROWS, 64, dtype=DTYPE, seed=1)]
    weight, bias = draw(70, 120, dtype=DTYPE, seed=2), draw(70, dtype=DTYPE, seed=3)
    y = output(ROWS, 70)
    module.rowwise_tma_launch(xs, weight, bias, y, [80, 8], TILE, 4).run(y.device)

    def twin(first, second, weight, bias):
        return first @ weight[:, 80:112].t() + second @ weight[:, 8:72].t() + bias

    tensors = [*xs, weight, bias]
    verify(y, twin(*tensors), twin(*(tensor.double() for tensor in tensors)))


def check_colwise(module, **programs):
    """Four blocks of a wider weight, with each activation."""
    x, weight, bias = inputs(150, 64 if programs else 40)
    ranges, names = [(3, 33), (40, 70), (70, 75), (80, 150)], ["gelu_tanh", None, "silu", "gelu"]
    ys = [output(ROWS, stop - start) for start, stop in ranges]
    launch = module.colwise_tma_launch if programs else module.colwise_launch
    launch(x, weight, bias, ys, [start for start, _ in ranges], names, TILE, **programs).run(x.device)
    for y, (start, stop), name in zip(ys, ranges, names, strict=True):

        def twin(x, weight, bias, name=name):
            y = x @ weight.t() + bias
            return y if name is None else ACTIVATIONS[name](y)

        tensors = [x, weight[start:stop], bias[start:stop]]
        verify(y, twin(*tensors), twin(*(tensor.double() for tensor in tensors)))


def check_gated(module, **programs):
    """[up | gate], the two blocks apart in a wider weight."""
    x, weight, bias = inputs(200, 64 if programs else 40)
    y = output(ROWS, 70)
    launch = module.gated_tma_launch if programs else module.gated_launch
    launch(x, weight, bias, y, 110, 20, "silu", TILE, **programs).run(x.device)

    def twin(x, weight, bias):
        up, gate = x @ weight[20:90].t() + bias[20:90], x @ weight[110:180].t() + bias[110:180]
        return torch.nn.functional.silu(gate) * up

    verify(y, twin(x, weight, bias), twin(x.double(), weight.double(), bias.double()))


def check_rms_norm(module):
    """Both passes over 150 of 300 channels; in bfloat16 also the rounding after each step, bit for bit."""
    for dtype, round_first in ((torch.float32, False), (torch.bfloat16, True)):
        x, weight, bias = draw(5, 150, dtype=dtype), draw(150, dtype=dtype, seed=3), draw(150, dtype=dtype, seed=4)
        squares = framed(torch.full((5,), NAN))
        module.sum_of_squares_launch(x, squares, STEP).run(x.device)
        check(squares, x.float().pow(2).sum(-1), x.double().pow(2).sum(-1))
        frame = torch.full((8, 150), -1.0, dtype=dtype)
        module.scale_launch(x, squares, weight, bias, frame[:5], 300, 0.5, round_first, STEP).run(x.device)
        assert bool((frame[5:] == -1).all()), "written outside the result"
        if round_first:
            y = x.float() * torch.rsqrt(squares[:, None] / 300 + 0.5)
            assert torch.equal(frame[:5], y.to(dtype) * weight + bias), "off by a rounding"
        else:
            exact = x.double() * torch.rsqrt(squares.double()[:, None] / 300 + 0.5) * weight.double() + bias.double()
            check(frame[:5], exact.to(dtype), exact)


MODULES = {
    "rowwise": rowwise,
    "rowwise_tma": rowwise_tma,
    "colwise": colwise,
    "colwise_tma": colwise_tma,
    "gated": gated,
    "gated_tma": gated_tma,
    "rms_norm": rms_norm,
}
CHECKS = {
    "rowwise": check_rowwise,
    "rowwise_tma": check_rowwise_tma,
    "colwise": check_colwise,
    "colwise_tma": partial(check_colwise, programs=4),
    "gated": check_gated,
    "gated_tma": partial(check_gated, programs=4),
    "rms_norm": check_rms_norm,
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
