"""Two checkpoints of one model, and whether a model holds its shards of one."""

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from toy import save_toy
from tp_layers.plans.shard import sharding_of

FILE = "diffusion_pytorch_model.safetensors"


def two_toys(folder: Path) -> tuple[Path, Path]:
    """The folders of two `Toy`s of other weights, in `folder`."""
    folders = folder / "first", folder / "second"
    for each in folders:
        each.mkdir()
        state = save_toy(each)
    save_file({name: tensor.flip(0) - 2 for name, tensor in state.items()}, folders[1] / FILE)
    return folders


def right(model: nn.Module, full: dict[str, torch.Tensor]) -> bool:
    """Whether the model holds its shards of `full`, in its own dtypes."""
    sharding, state = sharding_of(model), model.state_dict()
    for name, tensor in full.items():
        spec = sharding.resolved.specs.get(name)
        wanted = tensor if spec is None else spec.take(tensor, sharding.group.rank, sharding.group.size)
        if not torch.equal(state[name], wanted.to(state[name].dtype)):
            return False
    return True
