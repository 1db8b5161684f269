"""A small model with its right plan and the four classic wrong ones, for the tests of `verify`."""

import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from close import randomise
from tp_layers import Divide, PackedColwiseParallel, ShardParameter

WIDTH, HEADS, ROWS = 24, 4, 5


class Attention(nn.Module):
    """Self-attention with q and k normed over all heads at once, and heads counted by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        # This norm takes the mean over whatever width it is given.
        self.norm_q, self.norm_k = RMSNorm(WIDTH, eps=1e-6), RMSNorm(WIDTH, eps=1e-6)
        self.to_out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.norm_q(self.to_q(x)), self.norm_k(self.to_k(x)), self.to_v(x)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (q, k, v))
        y = nn.functional.scaled_dot_product_attention(q, k, v)
        return self.to_out(y.transpose(1, 2).flatten(2))


class Gate(nn.Module):
    """The two halves of a fused projection, one gating the other."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return nn.functional.silu(gate) * up


class Block(nn.Module):
    """Attention, then a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()
        self.gate_up, self.act, self.down = nn.Linear(WIDTH, 64), Gate(), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x)
        return x + self.down(self.act(self.gate_up(x)))


class Model(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def case() -> tuple[Model, torch.Tensor]:
    """The model, every parameter drawn, and its input."""
    return randomise(Model()), torch.randn(2, ROWS, WIDTH, generator=torch.Generator().manual_seed(3))


right = {
    "blocks.*.attn": Divide("heads"),
    "blocks.*.attn.to_q": "colwise",
    "blocks.*.attn.to_k": "colwise",
    "blocks.*.attn.to_v": "colwise",
    "blocks.*.attn.norm_q": "rms_norm",
    "blocks.*.attn.norm_k": "rms_norm",
    "blocks.*.attn.to_out": "rowwise",
    "blocks.*.gate_up": PackedColwiseParallel([1, 1]),
    "blocks.*.down": "rowwise",
}
swapped = {**right, "blocks.*.gate_up": "rowwise", "blocks.*.down": "colwise"}
plainly = {**right, "blocks.*.gate_up": "colwise"}
undivided = {key: style for key, style in right.items() if key != "blocks.*.attn"}
local_norm = {key: style for key, style in right.items() if "norm" not in key}
local_norm |= {"blocks.*.attn.norm_q.weight": ShardParameter(0), "blocks.*.attn.norm_k.weight": ShardParameter(0)}
misspelt = {**right, "blocks.*.atn.to_q": "colwise"}
