"""Text encoders: every parameter's gradient, on every rank, is the unsharded one; of tied ones, of all their uses."""

import re

import pytest
import torch
from torch import nn

import tp_layers
from close import FLOAT32, relative_error
from families import REGISTERED
from families.family import tensors
from tp_layers.group import Group
from tp_layers.plans.shard import sharding_of

TEXT = [label for label, family in REGISTERED.items() if family.config_class]
# In float64, so that what is compared is the derivative and not its rounding.
EXACT = torch.float64
Gradients = dict[str, torch.Tensor]


def backward(model: nn.Module, label: str) -> Gradients:
    """The gradients of a fixed weighted sum of all outputs, hidden states too."""
    inputs = REGISTERED[label].inputs()
    pixels = {name: value.to(EXACT) for name, value in inputs.items() if name == "pixel_values"}
    outputs = tensors(model(**inputs | pixels, return_dict=False))
    sum((item * torch.arange(item.numel(), dtype=EXACT).sin().view_as(item)).sum() for item in outputs).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def sharded(group: Group, label: str) -> tuple[Gradients, int]:
    """This rank's gradients, and how many parameters are sharded."""
    model = tp_layers.apply(REGISTERED[label].build(dtype=EXACT), group=group)
    return backward(nn.Module.to(model, EXACT), label), len(sharding_of(model).resolved.specs)


@pytest.mark.parametrize("label", TEXT)
def test_every_gradient_is_the_unsharded_one(ranks, label):
    family, model = REGISTERED[label], nn.Module.to(REGISTERED[label].build(), EXACT)
    wanted = backward(model, label)
    specs = sharding_of(tp_layers.apply(model, group=Group(0, 2))).resolved.specs
    for rank, (got, count) in enumerate(ranks(2, sharded, label)):
        assert count == len(specs) and got.keys() == wanted.keys()
        for name, full in wanted.items():
            share = specs[name].take(full, rank, 2) if name in specs else full
            if re.search(family.cancelled, name):
                # Only rounding is left of it.
                assert max(got[name].abs().max(), full.abs().max()) < 1e-12, name
            else:
                assert full.norm() > 1e-3 and relative_error(got[name], share) <= FLOAT32, name
