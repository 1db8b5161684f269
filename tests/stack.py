"""A model of unlike blocks with each kind of a planned parameter, and its plan."""

import torch
from torch import nn

from tp_layers import PackedColwiseParallel, ShardParameter


class Block(nn.Module):
    """Layers of unlike sizes, the largest neither first nor last, and each kind of a planned parameter."""

    def __init__(self, rows):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, rows), nn.RMSNorm(rows), nn.Linear(rows, 64)
        self.table = nn.Parameter(torch.ones(64, rows))
        self.whole = nn.Linear(64, 64)
        self.register_buffer("steps", torch.arange(64.0))
        self.register_buffer("cache", torch.ones(3), persistent=False)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rows) for rows in (64, 512, 128))


STACK = {
    "blocks.*.up": PackedColwiseParallel([1, 3]),
    "blocks.*.norm": "rms_norm",
    "blocks.*.table": ShardParameter(-1),
    "blocks.*.down": "rowwise",
}
