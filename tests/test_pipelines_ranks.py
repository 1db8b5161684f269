"""`apply` for a pipeline, and for a model, where one rank cannot or has other weights: all ranks hear of it."""

from typing import Any

import pytest
import torch

import tp_layers
from test_pipelines import build
from tp_layers.group import Group


def out_of_memory(group: Group) -> str:
    """The error of each rank where one cannot move its components."""
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setattr("tp_layers.pipeline.settle", fails)
        try:
            tp_layers.apply(build("Flux"), group=group)
        except (MemoryError, ValueError) as error:
            return str(error)
    return ""


def cut_fails(group: Group) -> str:
    """The error of each rank where one has no room for its shards."""
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setattr("tp_layers.in_memory.shard_model", fails)
        try:
            tp_layers.apply(build("Flux").transformer, group=group)
        except (MemoryError, ValueError) as error:
            return str(error)
    return ""


def other_values(group: Group) -> str:
    pipeline = build("Flux")
    with torch.no_grad():
        next(pipeline.vae.parameters())[0] += group.rank
    with pytest.raises(ValueError) as error:
        tp_layers.apply(pipeline, group=group)
    assert isinstance(pipeline.transformer.x_embedder, torch.nn.Linear)
    return str(error.value)


def fails(*args: Any) -> None:
    raise MemoryError("no room")


def test_a_rank_that_cannot_cut_is_heard_of(ranks):
    said = ranks(2, cut_fails)
    assert "rank 1 of 2 failed: MemoryError: no room" in said[0] and said[1] == "no room"


def test_ranks_with_unlike_components_are_refused(ranks):
    assert all("the ranks hold different values of 'vae." in said for said in ranks(2, other_values))


def test_a_rank_that_cannot_move_its_components_is_heard_of(ranks):
    said = ranks(2, out_of_memory)
    assert "rank 1 of 2 failed: MemoryError: no room" in said[0] and said[1] == "no room"
