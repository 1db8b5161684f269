"""Tied parameters that a plan cuts alike: one shard under all names, with the gradients of every use, saved once."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import tp_layers
from checkpoints import identical, state_of
from close import FLOAT32, randomise, relative_error
from families.decoders import tied
from refused import refused
from tp_layers.describe import describe
from tp_layers.group import Group

TABLES = {"embed": "embedding_rowwise", "head": "colwise_gather"}


class Tied(nn.Module):
    """An embedding table that is the output head too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.between, self.head = nn.Embedding(12, 6), nn.Linear(6, 6), nn.Linear(6, 12)
        self.head.weight = self.embed.weight
        randomise(self)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.between(self.embed(ids)).tanh())


def trained(group: Group, copied: bool) -> tuple[list[torch.Tensor], bool]:
    """The output, the table's gradient and its values after two steps."""
    model = tp_layers.apply(Tied(), TABLES, group=group)
    model = copy.deepcopy(model) if copied else model
    optimiser = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimiser.zero_grad()
        output = model(torch.tensor([[3, 1, 11], [0, 7, 3]]))
        (output * torch.arange(output.numel()).view_as(output).cos()).sum().backward()
        optimiser.step()
    weight = model.embed.weight
    return [output.detach(), weight.grad, weight.detach()], model.head.weight is weight


@pytest.mark.parametrize("copied", [False, True], ids=["as sharded", "copied"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_tied_table_is_trained_as_on_one_device(ranks, size, copied):
    (output, *of_table), one = trained(Group(), False)
    assert one
    for rank, ((got, *mine), same) in enumerate(ranks(size, trained, copied)):
        assert same and relative_error(got, output) <= FLOAT32
        for shard, full in zip(mine, of_table, strict=True):
            assert relative_error(shard, full.tensor_split(size)[rank]) <= FLOAT32


def saved(group: Group, folder: Any, sharded: bool) -> tuple[int, int, bool]:
    """Saves and loads a tied model: what is described, what is held, and whether the loaded one is tied."""
    model = Qwen3ForCausalLM._from_config(Qwen3Config(**tied(4)))
    tp_layers.apply(randomise(model), group=group)
    tp_layers.save(model, folder, sharded=sharded)
    again = tp_layers.load(Qwen3ForCausalLM, folder, group=group)
    held = sum(parameter.nbytes for parameter in again.parameters())
    return describe(again).held_bytes, held, again.lm_head.weight is again.model.embed_tokens.weight


@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "in shards"])
def test_a_tied_table_is_saved_and_loaded_once(ranks, tmp_path, sharded):
    model: Any = randomise(Qwen3ForCausalLM._from_config(Qwen3Config(**tied(4)))).eval()
    full = sum(parameter.nbytes for parameter in model.parameters())
    for described, held, same in ranks(2, saved, tmp_path, sharded):
        assert described == held and same and full / 2 < held < 0.52 * full
    if not sharded:
        assert "lm_head.weight" not in state_of(tmp_path)
    # From two ranks to one.
    again = tp_layers.load(Qwen3ForCausalLM, tmp_path, group=Group())
    assert identical(again.state_dict(), model.state_dict())


@pytest.mark.parametrize(
    ("plan", "name", "other"),
    [
        ({"embed": "embedding_rowwise"}, "embed.weight", "head.weight"),
        ({"head": "colwise_gather"}, "head.weight", "embed.weight"),
        ({**TABLES, "head": "rowwise_split_input"}, "embed.weight", "head.weight"),
        ({**TABLES, "head": "replicate"}, "embed.weight", "head.weight"),
    ],
    ids=["the table alone", "the head alone", "cut along another dim", "the head whole"],
)
def test_tied_parameters_that_are_not_cut_alike_are_refused(plan, name, other):
    model = Tied()
    with refused(model, f"'{name}' is tied to ['{other}']; untie it or leave both out of the plan, or cut them alike"):
        tp_layers.apply(model, plan, group=Group(0, 2))


def test_a_full_tied_table_stays_where_it_is():
    model = Tied()
    before = model.embed.weight
    tp_layers.apply(model, TABLES, group=Group(1, 3), copy=False)
    assert model.embed.weight is before and model.head.weight is before
