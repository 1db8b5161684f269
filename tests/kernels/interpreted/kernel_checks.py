"""One check per kernel, of its launch against float64, that a broken kernel must fail."""

from functools import partial

import torch
from rule import check, draw, framed, surrounded

from tp_layers.kernels import configs
from tp_layers.kernels.colwise import ACTIVATIONS

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


CHECKS = {
    "rowwise": check_rowwise,
    "rowwise_tma": check_rowwise_tma,
    "colwise": check_colwise,
    "colwise_tma": partial(check_colwise, programs=4),
    "gated": check_gated,
    "gated_tma": partial(check_gated, programs=4),
    "rms_norm": check_rms_norm,
}
