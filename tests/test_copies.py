"""A sharded model that is copied or pickled is still right, and keeps what it was told of other parallelism."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import tp_layers
from close import FLOAT32, randomise, relative_error
from families import FAMILIES, run
from tp_layers.group import Group
from tp_layers.plans.shard import sharding_of


class Attention(nn.Module):
    """Two heads, each normed by itself with one weight."""

    def __init__(self):
        super().__init__()
        self.to_q, self.norm_q, self.to_out = nn.Linear(8, 12), nn.RMSNorm(3), nn.Linear(12, 8)

    def forward(self, x):
        return self.to_out(self.norm_q(self.to_q(x).unflatten(-1, (-1, 3))).flatten(-2))


PLAN = {"to_q": "colwise", "to_out": "rowwise"}


def gradient(model: nn.Module) -> torch.Tensor:
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(2))
    (model(x) * torch.linspace(-1, 1, 40).view(5, 8)).sum().backward()
    return model.norm_q.weight.grad


def copied(group: Group) -> list[torch.Tensor]:
    """The head norm's gradient in the sharded model, in a copy of it, and in a copy of the copy after two calls."""
    model = tp_layers.apply(randomise(Attention()), PLAN, group=group)
    twin = copy.deepcopy(model)
    third = copy.deepcopy(twin)
    gradient(third)
    return [gradient(model), gradient(twin), gradient(third) / 2]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_copy_is_trained_as_its_original(ranks, size):
    wanted = gradient(randomise(Attention()))
    for found in ranks(size, copied):
        assert all(relative_error(got, wanted) <= FLOAT32 for got in found)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_sharded_on_one_rank_can_be_pickled(name):
    model = tp_layers.apply(FAMILIES[name].build(), group=Group())
    again = pickle.loads(pickle.dumps(model))
    wanted = run(model, FAMILIES[name].inputs())
    assert all(torch.equal(a, b) for a, b in zip(run(again, FAMILIES[name].inputs()), wanted, strict=True))
    assert sharding_of(again).resolved.specs == sharding_of(model).resolved.specs


def test_a_context_parallel_config_of_diffusers_stays():
    model: Any = FAMILIES["Flux2Transformer2DModel"].build()
    from diffusers.models._modeling_parallel import ContextParallelConfig, ParallelConfig

    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ring_degree=2))
    model._parallel_config = config
    sharded = tp_layers.apply(model, group=Group())._parallel_config
    assert sharded.context_parallel_config is config.context_parallel_config
    assert config.tensor_parallel_config is None and sharded.tensor_parallel_config is not None
