"""The kinds of norms that are sharded, and what a rank holds of their inputs and outputs."""

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from close import randomise
from tp_layers.plans.spec import ShardSpec

SIZES = [1, 2, 3, 4]
WIDTH = 228  # four times 57, three times 76
NORMS = {
    "torch": lambda width: nn.RMSNorm(width, eps=1e-6),
    "torch_large_eps": lambda width: nn.RMSNorm(width, eps=0.5),
    "torch_eps_none": lambda width: nn.RMSNorm(width),
    "torch_without_weight": lambda width: nn.RMSNorm(width, eps=1e-6, elementwise_affine=False),
    "diffusers": lambda width: RMSNorm(width, eps=1e-6),
    "diffusers_with_bias": lambda width: RMSNorm(width, eps=1e-6, bias=True),
    "diffusers_without_weight": lambda width: RMSNorm(width, eps=1e-6, elementwise_affine=False),
}
TORCH = [name for name in NORMS if name.startswith("torch")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def norm_for(name, dtype=torch.float32, width=WIDTH):
    return randomise(NORMS[name](width)).to(dtype)


def part(x, group, last=WIDTH):
    return ShardSpec.of(-1, last).take(x, group.rank, group.size)


def whole(norm, x):
    with torch.no_grad():
        return norm(x)
