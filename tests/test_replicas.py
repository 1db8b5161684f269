"""Data parallelism of a sharded model: right on another axis of the mesh, refused over the ranks of the sharding."""

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import tp_layers
from families import FAMILIES
from families.family import forward
from tp_layers.group import Group

FLUX = FAMILIES["FluxTransformer2DModel"]


def replicated(model: nn.Module, way: str, mesh: DeviceMesh) -> nn.Module:
    if way == "DistributedDataParallel":
        return DistributedDataParallel(model, process_group=mesh.get_group())
    for block in [*model.transformer_blocks, *model.single_transformer_blocks]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def called(model: nn.Module) -> tuple[str, list[torch.Tensor]]:
    try:
        return "", [item.detach() for item in forward(model, FLUX.inputs())]
    except ValueError as error:
        return str(error), []


def mesh_of(group: Group) -> DeviceMesh:
    # Of the group there is: a new one would be numbered by these ranks alone.
    return DeviceMesh.from_group(group.process_group, "cpu")


def over_the_same(group: Group, way: str) -> tuple[str, str, str]:
    """What a call of the model says before, and of the replicas, without and with gradients."""
    model = tp_layers.apply(FLUX.build(), group=group)
    before, replicas = called(model)[0], replicated(model, way, mesh_of(group))
    with torch.no_grad():
        evaluated = called(replicas)[0]
    return before, evaluated, called(replicas)[0]


def beside(group: Group) -> str:
    """What is said of torch's own tensor parallelism of a layer that the plan leaves out."""
    model = tp_layers.apply(FLUX.build(), group=group)
    parallelize_module(model.x_embedder, mesh_of(group), ColwiseParallel(output_layouts=Replicate()))
    return called(model)[0]


def over_another(group: Group, way: str) -> tuple[str, bool]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = tp_layers.apply(FLUX.build(), group=mesh["tp"])
    wanted = called(model)[1]
    said, got = called(replicated(model, way, mesh["dp"]))
    return said, all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


WAYS: Any = pytest.mark.parametrize("way", ["DistributedDataParallel", "fully_shard"])


@WAYS
def test_over_the_ranks_of_the_sharding_it_is_refused(ranks, way):
    for before, *others in ranks(2, over_the_same, way):
        assert before == ""
        for said in others:
            # fully_shard makes a class of its own of it.
            assert re.match(rf"{way} has mixed the shards of this (FSDP)?FluxTransformer2DModel.* ranks \[0, 1\]", said)


def test_what_is_no_replica_is_left_alone(ranks):
    assert ranks(2, beside) == ["", ""]


@WAYS
def test_over_another_axis_nothing_changes(ranks, way):
    for said, same in ranks(4, over_another, way):
        assert said == "" and same
