"""A colwise and a rowwise layer with what a block has between them: output and gradients of the unsharded pair."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from close import nearly, randomise
from linears import SIZES
from seeded import noise
from tp_layers.layers.linear import ColwiseLinear, RowwiseLinear
from tp_layers.plans.spec import ShardSpec


class GatedPair(nn.Module):
    """Fused q, k, v and a gated MLP -> one output projection of the attention's and the MLP's channels."""

    def __init__(self, size):
        super().__init__()
        self.width = 3 * size
        self.fused = nn.Linear(13, 7 * self.width)
        self.out = nn.Linear(3 * self.width, 11)
        randomise(self)

    def forward(self, x, size=1):
        q, k, v, gate, up = self.fused(x).split([part * self.width // size for part in (1, 1, 1, 2, 2)], -1)
        return self.out(torch.cat([q * torch.sigmoid(k) + v, F.silu(gate) * up], -1))


class PlainPair(nn.Module):
    """Up, GELU, down, as in a feed-forward block."""

    def __init__(self, size):
        super().__init__()
        self.fused, self.out = nn.Linear(13, 9 * size), nn.Linear(9 * size, 11)
        randomise(self)

    def forward(self, x, size=1):
        return self.out(F.gelu(self.fused(x)))


PAIRS = {"colwise_gelu_rowwise": (PlainPair, [1], [1]), "gated_parallel_block": (GatedPair, [1, 1, 1, 2, 2], [1, 2])}


def run_pair(group, model, blocks, x, grads):
    model.fused = ColwiseLinear.from_linear(model.fused, group=group, blocks=blocks[0])
    model.out = RowwiseLinear.from_linear(model.out, group=group, blocks=blocks[1])
    return forward_backward(model, x, grads, group.size)


def forward_backward(model, x, grads, size=1):
    leaf = x.clone().requires_grad_()
    for grad in grads:
        y = model(leaf, size)
        y.backward(grad)
    return y.detach(), leaf.grad, {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("calls", [1, 2], ids=["one_backward", "two_backwards_accumulated"])
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("size", SIZES)
def test_a_pair_has_the_output_and_gradients_of_the_unsharded_pair(ranks, size, pair, calls):
    build, *blocks = PAIRS[pair]
    x = noise(2, 7, 13)
    grads = [noise(2, 7, 11, seed=1 + call) for call in range(calls)]
    found = ranks(size, run_pair, build(size), blocks, x, grads)
    y, x_grad, wanted = forward_backward(build(size), x, grads)
    specs = {name: ShardSpec.of(0, grad.shape[0], blocks[0]) for name, grad in wanted.items() if "fused" in name}
    specs["out.weight"] = ShardSpec.of(1, wanted["out.weight"].shape[1], blocks[1])
    for rank, (output, leaf_grad, parameter_grads) in enumerate(found):
        assert nearly(output, y)
        assert nearly(leaf_grad, x_grad)
        for name, grad in parameter_grads.items():
            assert nearly(grad, specs[name].take(wanted[name], rank, size) if name in specs else wanted[name])
        # What is whole is whole to the bit: ranks that train stay equal.
        for got, first in ((output, found[0][0]), (leaf_grad, found[0][1])):
            assert torch.equal(got, first)
        assert torch.equal(parameter_grads["out.bias"], found[0][2]["out.bias"])
