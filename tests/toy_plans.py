"""A model of small blocks, plans for it, and the checks that a wrong plan is refused, on a device and on meta."""

import pytest
import torch
from torch import nn

from refused import OwnLinear, refused
from tp_layers import PackedColwiseParallel, PackedRowwiseParallel, apply
from tp_layers.group import Group
from tp_layers.plans.resolve import resolve


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.own = OwnLinear(8, 8)
        self.rms, self.layer_norm = nn.RMSNorm(8), nn.LayerNorm(8)
        self.over_two = nn.RMSNorm((2, 4))
        self.table = nn.Parameter(torch.ones(3, 8))
        self.groups, self.ratio, self.flag = 6, 0.5, True


class Toy(nn.Module):
    def __init__(self, blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))


PAIR = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}


def packed(blocks):
    return {"blocks.*.up": PackedColwiseParallel(blocks), "blocks.*.down": "rowwise"}


def row_packed(blocks):
    return {"blocks.*.up": "colwise", "blocks.*.down": PackedRowwiseParallel(blocks)}


def plus(key, style):
    return {**PAIR, key: style}


def check_refused(plan, size, message):
    model = Toy()
    with refused(model, *message):
        apply(model, plan, group=Group(0, size))
    with refused(model, *message):
        resolve(model, plan, size)


def check_refused_on_meta(plan, size, message):
    with torch.device("meta"):
        model = Toy()
    with pytest.raises(ValueError) as info:
        resolve(model, plan, size)
    assert [part for part in message if part not in str(info.value)] == []
