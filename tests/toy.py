"""A diffusers model with everything that a checkpoint can hold, its plan, and checkpoints of it."""

from pathlib import Path

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from safetensors.torch import save_file
from torch import nn

from close import randomise

PLAN = {"up": "colwise", "down": "rowwise"}


class Toy(ModelMixin, ConfigMixin):
    """A pair that can be sharded, two tied Linears, a parameter registered twice, buffers, and tables in attributes."""

    _keep_in_fp32_modules = None

    @register_to_config
    def __init__(self, width: int = 6, hidden: int = 8):
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.embed, self.head = nn.Linear(width, 5, bias=False), nn.Linear(width, 5)
        self.head.weight = self.embed.weight
        shift = nn.Parameter(torch.randn(width), requires_grad=False)
        self.shift = shift
        self.same_shift = shift
        self.register_buffer("scale", torch.linspace(0, 1, width))
        self.register_buffer("exact", torch.linspace(0, 1, width, dtype=torch.float64))
        self.register_buffer("steps", torch.arange(3))
        self.register_buffer("table", torch.linspace(0, 1, hidden).cos(), persistent=False)
        self.rope = [torch.linspace(0, 2, hidden).sin(), torch.arange(4)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x [.., width]` -> `[.., 5]`."""
        x = x * self.scale + self.down(torch.relu(self.up(x))) + self.shift + self.same_shift
        return self.head(x) + self.embed(x)


def save_toy(folder: Path, dtype: torch.dtype | None = None, **config: int) -> dict[str, torch.Tensor]:
    """A checkpoint of a `Toy`: tied parameters have one entry, floating-point tensors are in `dtype` if it is given."""
    model = randomise(Toy(**config))
    model.save_config(folder)
    state = {name: tensor for name, tensor in model.state_dict().items() if name not in ("head.weight", "same_shift")}
    state = {
        name: tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor for name, tensor in state.items()
    }
    save_file(state, folder / "diffusion_pytorch_model.safetensors")
    return state
