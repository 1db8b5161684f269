"""What a sharded layer costs beside torch's: one token's forward, where everything but the GEMM shows.

    make bench

At size 1, so that no collective is timed: the difference to `nn.Linear` is the layers' own code on the host.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tp_layers import ColwiseLinear, RowwiseLinear
from tp_layers.group import Group

WIDTH, INNER = 64, 256

# A second thread costs more to start than these products take.
torch.set_num_threads(1)


def pair(kind: str) -> nn.Module:
    """An MLP of torch's layers, or of the sharded ones on one rank."""
    up, down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
    if kind == "sharded":
        group = Group()
        return nn.Sequential(
            ColwiseLinear.from_linear(up, group=group), nn.GELU(), RowwiseLinear.from_linear(down, group=group)
        )
    return nn.Sequential(up, nn.GELU(), down)


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_host_cost_of_an_mlp(benchmark: Callable, kind: str):
    model, x = pair(kind), torch.randn(1, WIDTH)
    with torch.no_grad():
        y = benchmark(model, x)
    assert y.shape == x.shape
