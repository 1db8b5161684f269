"""What one rank does, and times, for `load.py`: this package's loading, diffusers', and the floors under both."""

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import Flux2Transformer2DModel
from diffusers.hooks import tensor_parallel
from diffusers.models._modeling_parallel import TensorParallelConfig
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import tp_layers
from host_memory import give_back, most_memory
from tp_layers.exchange import gather_objects
from tp_layers.group import Group
from tp_layers.loader.report import LoadReport
from tp_layers.plans.shard import sharding_of

PAGE = os.sysconf("SC_PAGESIZE")
PIECE = 8 << 20

# Of every file and rank.
diffusers.utils.logging.disable_progress_bar()

# The model that a rank keeps between two calls, whose weights are replaced in place, and its report.
_kept: dict[str, Any] = {}


def keep(group: Group, folder: Path) -> LoadReport:
    """Loads the model that the ways in place work on."""
    _kept.clear()
    _kept["model"], _kept["report"] = tp_layers.load(Flux2Transformer2DModel, folder, group=group, report=True)
    _kept["source"] = torch.ones(256 << 20, dtype=torch.uint8)
    return _kept["report"]


def forget(group: Group) -> None:
    """Frees it."""
    _kept.clear()
    gc.collect()


def timed(group: Group, way: str, folder: Path, cold: bool) -> dict[str, float]:
    """Seconds of one way on this rank, bytes it took from the disk, and its peak of anonymous memory."""
    give_back()
    if cold and group.rank == 0:
        _drop(folder)
    gather_objects(None, group)
    taken, start = _disk_bytes(), time.perf_counter()
    with most_memory(0.005) as most:
        model = WAYS[way](group, folder)
        seconds = time.perf_counter() - start
    del model
    return {"seconds": seconds, "disk": _disk_bytes() - taken, "peak": most[0]}


def is_right(group: Group, folder: Path) -> bool:
    """Whether the kept model holds its shards of the checkpoint, bit for bit."""
    specs = sharding_of(_kept["model"]).resolved.specs  # type: ignore[union-attr]
    state = _kept["model"].state_dict()
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118
                full, spec = opened.get_tensor(name), specs.get(name)
                wanted = full if spec is None else spec.take(full, group.rank, group.size)
                if not torch.equal(wanted.view(torch.uint8), state[name].view(torch.uint8)):
                    return False
    return True


def _memcpy(group: Group, folder: Path) -> None:
    """As many bytes as this rank's shards have, from memory into the model."""
    source = _kept["source"]
    for parameter in _kept["model"].parameters():
        target = parameter.detach().view(-1).view(torch.uint8)
        for first in range(0, target.numel(), source.numel()):
            piece = target[first : first + source.numel()]
            piece.copy_(source[: piece.numel()])


def _reload(group: Group, folder: Path) -> None:
    tp_layers.reload(_kept["model"], folder)


def _peer_in_place(group: Group, folder: Path) -> None:
    """diffusers' sharded load, copied into the model."""
    theirs = _local(_peer(group, folder))
    for name, parameter in _kept["model"].named_parameters():
        parameter.detach().copy_(theirs[name])


def _load(group: Group, folder: Path) -> nn.Module:
    return _touched(tp_layers.load(Flux2Transformer2DModel, folder, group=group))


def _peer_load(group: Group, folder: Path) -> nn.Module:
    return _touched(_peer(group, folder))


def _full(group: Group, folder: Path) -> nn.Module:
    """The full model in the memory of every rank, sharded afterwards.

    Without `disable_mmap`, on a CPU, it would not be in memory at all, but stay in the files.
    """
    full = Flux2Transformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16, disable_mmap=True)
    return _touched(tp_layers.apply(full, group=group))


def _sequential(group: Group, folder: Path) -> None:
    """All files once, in order, by the first rank: together the ranks request every byte."""
    if group.rank == 0:
        buffer = memoryview(bytearray(PIECE))
        for file in sorted(folder.glob("*.safetensors")):
            with open(file, "rb", buffering=0) as stream:
                while stream.readinto(buffer):
                    pass
    gather_objects(None, group)


WAYS: dict[str, Callable[[Group, Path], Any]] = {
    "memcpy": _memcpy,
    "reload": _reload,
    "diffusers, copied on": _peer_in_place,
    "load": _load,
    "diffusers": _peer_load,
    "full, then apply": _full,
    "sequential read": _sequential,
}


def _peer(group: Group, folder: Path) -> nn.Module:
    """diffusers' own sharded load, which knows no CPU ranks: it divides by the number of accelerators."""
    mesh = DeviceMesh.from_group(group.process_group, "cpu", mesh_dim_names=("tp",))  # type: ignore[arg-type]
    kept = torch.accelerator.device_count, tensor_parallel._SUPPORTED_TP_DEVICES
    torch.accelerator.device_count = lambda: 1
    tensor_parallel._SUPPORTED_TP_DEVICES = (*kept[1], "cpu")
    try:
        return Flux2Transformer2DModel.from_pretrained(
            folder, torch_dtype=torch.bfloat16, parallel_config=TensorParallelConfig(mesh=mesh)
        )
    finally:
        torch.accelerator.device_count, tensor_parallel._SUPPORTED_TP_DEVICES = kept


def _local(model: nn.Module) -> dict[str, torch.Tensor]:
    parameters = model.named_parameters()
    return {name: it.to_local() if isinstance(it, DTensor) else it.detach() for name, it in parameters}


def _touched(model: nn.Module) -> nn.Module:
    """The model, once every page of its weights has been looked at: mapped ones are read only then."""
    for tensor in _local(model).values():
        tensor.detach().contiguous().view(-1).view(torch.uint8)[::PAGE].sum()
    return model


def _drop(folder: Path) -> None:
    """Puts the files out of the page cache."""
    for file in folder.glob("*.safetensors"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def _disk_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))
