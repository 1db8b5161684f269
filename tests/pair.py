"""The smallest model that can be sharded, and its plan."""

import torch
from torch import nn

PLAN = {"up": "colwise", "down": "rowwise"}


class Pair(nn.Module):
    """A colwise and a rowwise projection around a ReLU."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())
