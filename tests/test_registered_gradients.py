"""Every registered class: each parameter's gradient, on both of two ranks, is the unsharded model's."""

import re

import pytest
import torch
from torch import nn

import tp_layers
from close import relative_error
from families import REGISTERED
from families.family import backward
from tp_layers.group import Group
from tp_layers.plans.shard import sharding_of

# In float64, so that what is compared is the derivative and not its rounding, but for what computes in float32 alone.
# Linear attention in float32 leaves 6e-6, and a gradient of half the heads is 0.1 off at least.
SINGLE = re.compile("Cosmos|Kandinsky5|MotifVideo|Nucleus.*grouped")
BOUND = {torch.float64: 1e-4, torch.float32: 1e-3}
# Nothing but rounding is left of what cancels out, as a bias of all keys does in the softmax: of the largest gradient.
NOISE = {torch.float64: 1e-9, torch.float32: 1e-6}
# torch's FlexAttention has no backward on a CPU.
WITHOUT = re.compile("AnyFlowFAR|WanAnimate2")
Gradients = dict[str, torch.Tensor | None]


def build(label: str) -> tuple[nn.Module, torch.dtype]:
    """A model, all of it in the dtype that it is compared in."""
    dtype = torch.float32 if SINGLE.search(label) else torch.float64
    return nn.Module.to(REGISTERED[label].build(), dtype), dtype


def sharded(group: Group, label: str) -> tuple[Gradients, int]:
    """Each parameter's gradient on this rank, and how many parameters are sharded."""
    model, dtype = build(label)
    tp_layers.apply(model, group=group)
    return backward(model, REGISTERED[label].inputs(), dtype), len(sharding_of(model).resolved.specs)


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in REGISTERED if not WITHOUT.search(label)])
def test_every_gradient_on_both_ranks_equals_the_unsharded_one(ranks, label):
    model, dtype = build(label)
    wanted = backward(model, REGISTERED[label].inputs(), dtype)
    specs = sharding_of(tp_layers.apply(model)).resolved.specs
    largest = max(full.abs().max() for full in wanted.values() if full is not None)
    for rank, (got, count) in enumerate(ranks(2, sharded, label)):
        assert count == len(specs) and got.keys() == wanted.keys()
        for name, full in wanted.items():
            if full is None:
                assert got[name] is None, name
                continue
            share = specs[name].take(full, rank, 2) if name in specs else full
            noise = NOISE[dtype] * largest
            if full.abs().max() < noise:
                assert got[name].abs().max() < 10 * noise, name
            else:
                assert relative_error(got[name], share) <= BOUND[dtype], name
