"""The sharded layers with their Triton kernels, end to end on gloo ranks, against the torch twins."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from interpreter import repair
from rule import check
from torch import nn

from tp_layers import AcrossRMSNorm, ColwiseLinear, RowwiseLinear
from tp_layers.group import Group
from tp_layers.kernels.jit.launch import Launch
from tp_layers.launch import Ranks
from tp_layers.layers.options import Options

WIDTH, INNER, ROWS = 40, 72, 6
KERNELS = {"colwise_kernel", "rowwise_kernel", "sum_of_squares_kernel", "scale_kernel"}


class Block(nn.Module):
    """A packed projection whose two halves are normed and gated, and a rowwise one behind them."""

    def __init__(self, options: Options, group: Group, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        up, down, norm = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH), nn.RMSNorm(INNER, eps=1e-6)
        for parameter in (*up.parameters(), *down.parameters(), *norm.parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = (noise / parameter.shape[-1] ** 0.5 if parameter.dim() > 1 else noise).to(dtype)
        self.up = ColwiseLinear.from_linear(up, group=group, blocks=[1, 1], options=options)
        self.norm = AcrossRMSNorm.from_norm(norm, group=group, options=options)
        self.down = RowwiseLinear.from_linear(down, group=group, options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * self.norm(up))


def outputs(group: Group, dtype: torch.dtype) -> dict[str, Any]:
    """The block by both backends, by the twin in float64, and the kernels that were launched."""
    launched, run = set(), Launch.run
    if not getattr(Launch, "repaired", False):
        repair()
        Launch.repaired = True

    def counted(self: Launch, device: torch.device) -> None:
        launched.add(self.kernel.__name__)
        run(self, device)

    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    Launch.run = counted
    try:
        # Without gradients, and with them: both are forward calls of the kernels.
        grad = Block(Options("triton"), group, dtype)(x).detach()
        with torch.no_grad():
            triton = Block(Options("triton"), group, dtype)(x)
            wide = Block(Options("triton", reduce_dtype=torch.float32), group, dtype)(x)
    finally:
        Launch.run = run
    with torch.no_grad():
        twin = Block(Options("torch"), group, dtype)(x)
        exact = Block(Options("torch"), group, dtype).double()(x.double())
    return {"triton": triton, "grad": grad, "wide": wide, "twin": twin, "exact": exact, "launched": launched}


@pytest.fixture
def launched() -> Iterator[None]:
    """Kernels are launched and counted on the ranks here."""
    yield


@pytest.fixture(scope="module")
def pool() -> Iterator[Ranks]:
    with Ranks(4, timeout=120) as ranks:
        yield ranks


@pytest.mark.parametrize("size", [2, 4], ids=["two ranks", "four ranks"])
def test_layers_on_ranks_agree_with_their_twins(pool, size, dtype):
    results = pool.run(outputs, dtype, size=size)
    for result in results:
        assert result["launched"] >= KERNELS
        assert torch.equal(result["triton"], results[0]["triton"]) and torch.equal(result["grad"], result["triton"])
        for way in ("triton", "wide"):
            check(result[way], result["twin"], result["exact"])
