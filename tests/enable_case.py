"""What ranks do with diffusers' own tensor-parallel calls while this package carries them out."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import AutoModel
from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig
from torch.distributed.device_mesh import DeviceMesh

import tp_layers
from families import FAMILIES, REGISTERED, digest, run
from tp_layers.group import Group
from tp_layers.loader.report import LoadReport
from tp_layers.plans.shard import sharding_of

Outputs = tuple[list[torch.Tensor], int]


def config_of(way: str, group: Group) -> Any:
    """A config for all ranks of the group, each time as another user writes it."""
    if way == "mesh":
        return TensorParallelConfig(mesh=DeviceMesh.from_group(group.process_group, "cpu", mesh_dim_names=("tp",)))
    config = TensorParallelConfig(tp_degree=group.size)
    return ParallelConfig(tensor_parallel_config=config) if way == "in a ParallelConfig" else config


def procedure(group: Group, name: str, state: dict[str, torch.Tensor], way: str = "tp_degree") -> Outputs:
    """diffusers' own test of a model: built, given its state, shown as sharded by `enable_parallelism`, and called."""
    family = REGISTERED[name]
    model = family.cls(**family.config(4))
    model.load_state_dict(state)
    model.to("cpu")
    model.eval()
    with tp_layers.diffusers.enable():
        model.enable_parallelism(config=config_of(way, group))
    assert sharding_of(model) is not None
    outputs = run(model, family.inputs())
    return outputs, digest(outputs)


@contextmanager
def reports() -> Iterator[list[LoadReport]]:
    """The reports of the loads within it."""
    found: list[LoadReport] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.extend(it for it in record.args or () if isinstance(it, LoadReport))

    logger, handler = logging.getLogger("tp_layers.loader.load"), Keep()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield found
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def loaded(group: Group, name: str, folder: Path, way: str, options: dict[str, Any]) -> dict[str, Any]:
    """A sharded `from_pretrained`: its outputs, what it read and what stands on the model."""
    family = REGISTERED[name]
    cls = AutoModel if way == "AutoModel" else family.cls
    config = config_of(way, group)
    with tp_layers.diffusers.enable(), reports() as found:
        model = cls.from_pretrained(str(folder), parallel_config=config, **options)
    outputs = run(model, family.inputs(), options.get("torch_dtype"))
    kept = model._parallel_config
    own = kept.tensor_parallel_config
    assert isinstance(kept, ParallelConfig) and config in (kept, own)
    assert (own._rank, own._world_size, own._tp_degree) == (dist.get_rank(), dist.get_world_size(), group.size)
    assert own._mesh.size() == group.size and own._device == torch.device("cpu")
    return {
        "outputs": outputs,
        "digest": digest(outputs),
        "report": found[0],
        "held": sum(parameter.nbytes for parameter in model.parameters()),
        "devices": {str(parameter.device) for parameter in model.parameters()},
        "dtypes": {parameter.dtype for parameter in model.parameters()},
        "training": model.training,
        "name": model.config._name_or_path,
        "sharding": sharding_of(model) is not None,
    }


def saved(group: Group, folder: Path, target: Path) -> str:
    """A model loaded sharded, saved whole; what its own `save_pretrained` says."""
    with tp_layers.diffusers.enable():
        model = FAMILIES["Flux2Transformer2DModel"].cls.from_pretrained(
            folder, parallel_config=TensorParallelConfig(tp_degree=group.size)
        )
    tp_layers.save(model, target)
    try:
        model.save_pretrained(target)
    except NotImplementedError as error:
        return str(error)
    return ""


def on_one(group: Group, change: Callable[[int], dict[str, Any]], folder: Path) -> str:
    """What each rank is told where `change(rank)` gives one of them other arguments."""
    cls = FAMILIES["Flux2Transformer2DModel"].cls
    arguments = {"parallel_config": TensorParallelConfig(tp_degree=group.size), **change(group.rank)}
    with tp_layers.diffusers.enable():
        try:
            cls.from_pretrained(folder, **arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def other_degree(rank: int) -> dict[str, Any]:
    return {"parallel_config": TensorParallelConfig(tp_degree=1 + rank)}


def mapped_on_one(rank: int) -> dict[str, Any]:
    return {"device_map": {"": "cpu"}} if rank == 1 else {}


def two_of_four(rank: int) -> dict[str, Any]:
    return {"parallel_config": TensorParallelConfig(tp_degree=2)}


def quantised_on_one(group: Group) -> str:
    """What `enable_parallelism` says on each rank where rank 1 has a model that is quantised."""
    model = FAMILIES["Flux2Transformer2DModel"].build()
    model.is_quantized = group.rank == 1
    with tp_layers.diffusers.enable():
        try:
            model.enable_parallelism(config=config_of("tp_degree", group))
        except ValueError as error:
            return str(error)
    return ""


def on_a_mesh(group: Group, folder: Path) -> str:
    """What `from_pretrained` says to a mesh of this group."""
    with tp_layers.diffusers.enable():
        try:
            FAMILIES["Flux2Transformer2DModel"].cls.from_pretrained(folder, parallel_config=config_of("mesh", group))
        except ValueError as error:
            return str(error)
    return ""
