"""Layers of experts that are exact in small integers: Linears for each expert, and bare parameters for all of them."""

import torch
from torch import nn

from small_models import small_integers
from tp_layers import PackedColwiseParallel, ShardParameter

WIDTH, INNER, EXPERTS = 6, 8, 3


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(gate.relu() * up)


class Router(nn.Module):
    """How much each expert counts for each row, in integers too."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(EXPERTS, WIDTH))

    def forward(self, x):
        return x @ self.weight.t()


class Experts(nn.Module):
    """One expert for each row, weighted by the router, and one shared by all rows, which `condition` scales."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert() for _ in range(EXPERTS))
        self.shared, self.router = Expert(), Router()

    def forward(self, x, *, condition):
        weight, index = self.router(x).max(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            y = y.index_add(0, rows := (index == number).nonzero()[:, 0], expert(x[rows]) * weight[rows, None])
        return y + self.shared(x * condition["scale"])


class Bare(nn.Module):
    """The same sums over all experts, of two parameters; it returns a transposed view."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.ones(EXPERTS, WIDTH, INNER))
        self.down = nn.Parameter(torch.ones(EXPERTS, INNER, WIDTH))
        self.router = Router()

    def forward(self, x, *, condition):
        h = torch.einsum("mk,ekn->emn", x * condition["scale"], self.up).relu() @ self.down
        return (h * self.router(x).t()[..., None]).sum(0).t().contiguous().t()


class Around(nn.Module):
    """A layer before and one after, through which a wrong gradient shows."""

    def __init__(self, kind):
        super().__init__()
        self.before, self.moe, self.after = nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.before(x)
        return self.after(self.moe(x, condition={"scale": x[:1]}))


def build(kind):
    model = Around(kind).double()
    for seed, parameter in enumerate(model.parameters()):
        # Mostly of one size: more of the products would still be exact, but not their sums in float64.
        parameter.data = small_integers(*parameter.shape, seed=seed)
    return model


PLANS = {
    Experts: {
        "moe": "all_reduce_output",
        "moe.router": "replicated_with_grad_allreduce",
        "moe.experts.*.gate_up": PackedColwiseParallel([1, 1]),
        "moe.experts.*.down": "rowwise_partial",
        "moe.shared.gate_up": PackedColwiseParallel([1, 1]),
        "moe.shared.down": "rowwise_partial",
    },
    Bare: {
        "moe.up": ShardParameter(2),
        "moe.down": ShardParameter(1, partial=True),
        "moe.router": "replicated_with_grad_allreduce",
        "moe": "all_reduce_output",
    },
}
CUTS = {
    f"moe.{expert}.{key}": (dim, blocks)
    for expert in ("experts.0", "experts.1", "experts.2", "shared")
    for key, dim, blocks in (
        ("gate_up.weight", 0, [INNER, INNER]),
        ("gate_up.bias", 0, [INNER, INNER]),
        ("down.weight", 1, [INNER]),
    )
} | {"moe.up": (2, [INNER]), "moe.down": (1, [INNER])}
