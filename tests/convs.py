"""Models of convolutions in one, two or three extents, exact in small integers, their plans, and cuts by hand."""

from torch import nn

from small_models import small_integers
from tp_layers import PackedColwiseParallel, PackedDepthwise

CONVS = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
CHANNELS, INNER, OUT = 4, 8, 5
EXTENTS = (5, 4, 3)


class Convs(nn.Module):
    """Up to twice the inner channels, a filter for each, and down, each with a kernel, padding or stride of its own."""

    def __init__(self, extents):
        super().__init__()
        conv = CONVS[extents]
        self.inverted = conv(CHANNELS, 2 * INNER, 1)
        self.depth = conv(2 * INNER, 2 * INNER, 3, padding=2, dilation=2, groups=2 * INNER)
        self.point = conv(2 * INNER, OUT, 2, stride=2, padding=1)

    def forward(self, x):
        return self.point(self.depth(self.inverted(x).relu()))


class Gated(Convs):
    """Of the two halves between, one is the gate of the other."""

    def __init__(self, extents):
        super().__init__(extents)
        self.point = CONVS[extents](INNER, OUT, 2, stride=2, padding=1)

    def forward(self, x):
        x, gate = self.depth(self.inverted(x).relu()).chunk(2, dim=-1 - len(self.point.kernel_size))
        return self.point(x * gate.relu())


class Along(nn.Module):
    """A convolution of all channels along the first extent, whose reader needs all of them."""

    def __init__(self, extents):
        super().__init__()
        rest = [1] * (extents - 1)
        self.conv = CONVS[extents](CHANNELS, INNER, (3, *rest), padding=(1, *[0] * len(rest)))
        self.reader = CONVS[extents](INNER, OUT, 1, bias=False)

    def forward(self, x):
        return self.reader(self.conv(x))


# Model, plan, and of every parameter that is cut its dim and blocks.
CASES = {
    "plain": (
        Convs,
        {"inverted": "colwise", "depth": "depthwise", "point": "rowwise"},
        {f"{name}.{part}": (0, [2 * INNER]) for name in ("inverted", "depth") for part in ("weight", "bias")}
        | {"point.weight": (1, [2 * INNER])},
    ),
    "gated": (
        Gated,
        {"inverted": PackedColwiseParallel([1, 1]), "depth": PackedDepthwise([1, 1]), "point": "rowwise"},
        {f"{name}.{part}": (0, [INNER] * 2) for name in ("inverted", "depth") for part in ("weight", "bias")}
        | {"point.weight": (1, [INNER])},
    ),
    "gathered": (Along, {"conv": "colwise_gather"}, {"conv.weight": (0, [INNER]), "conv.bias": (0, [INNER])}),
    "split_input": (Along, {"conv": "rowwise_split_input"}, {"conv.weight": (1, [CHANNELS])}),
}
GATED = CASES["gated"][1]


def build(case, extents):
    """The model of a case, in float64."""
    model = CASES[case][0](extents).double()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = small_integers(*parameter.shape, seed=seed)
    return model


def inputs(extents, order="contiguous", batch=(2,)):
    """`[*batch, CHANNELS, *extents]`, contiguous, or in another order of memory: channels last, or as a slice."""
    x, dim = small_integers(*batch, CHANNELS, *EXTENTS[:extents], seed=9), -1 - extents
    if order == "channels_last":
        return x.movedim(dim, -1).contiguous().movedim(-1, dim)
    return (
        x.repeat_interleave(2, dim)[(..., slice(None, None, 2), *[slice(None)] * extents)] if order == "sliced" else x
    )
