"""Against diffusers' own tensor parallelism, on the same weights, ranks and inputs."""

from typing import Any

import pytest
import torch
from diffusers.hooks import tensor_parallel
from diffusers.models._modeling_parallel import TensorParallelConfig
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tp_layers
from close import FLOAT32, relative_error
from families import FAMILIES, run
from tp_layers.group import Group

PLANNED = ["FluxTransformer2DModel", "Flux2Transformer2DModel", "QwenImageTransformer2DModel"]
PLANNED += ["QwenImage21Transformer2DModel"]


def both(group: Group, name: str, plan: dict[str, Any] | None) -> dict[str, Any]:
    """The outputs of both libraries, and the parameters that each of them sharded."""
    family = FAMILIES[name]
    peer, ours = family.build(), family.build()
    mesh = DeviceMesh.from_group(group.process_group, "cpu", mesh_dim_names=("tp",))
    config = TensorParallelConfig(mesh=mesh)
    config.setup(group.rank, group.size, torch.device("cpu"), mesh)
    supported = tensor_parallel._SUPPORTED_TP_DEVICES
    tensor_parallel._SUPPORTED_TP_DEVICES = (*supported, "cpu")
    try:
        tensor_parallel.apply_tensor_parallel(peer, config, type(peer)._tp_plan)
    finally:
        tensor_parallel._SUPPORTED_TP_DEVICES = supported
    tp_layers.apply(ours, plan, group=mesh)
    mine = dict(ours.named_parameters())
    shards = {}
    for key, parameter in peer.named_parameters():
        if isinstance(parameter, DTensor):
            shards[key] = torch.equal(parameter.to_local(), mine[key])
    return {"peer": run(peer, family.inputs()), "ours": run(ours, family.inputs()), "shards": shards}


@pytest.mark.parametrize("name", PLANNED)
@pytest.mark.parametrize("source", ["registered plan", "the class's own plan"])
def test_same_output_and_same_shards_as_diffusers(ranks, name, source):
    plan = FAMILIES[name].build()._tp_plan if source == "the class's own plan" else None
    results = ranks(2, both, name, plan)
    wanted = run(FAMILIES[name].build(), FAMILIES[name].inputs())
    for result in results:
        for peer, ours, reference in zip(result["peer"], result["ours"], wanted, strict=True):
            assert relative_error(peer, reference) <= FLOAT32
            assert relative_error(ours, peer) <= FLOAT32
        assert len(result["shards"]) > 10 and all(result["shards"].values())
