"""An attention whose projections are computed together, and what it is compared with."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import tp_layers
from close import randomise
from functions import Functions
from seeded import noise
from tp_layers.group import Group
from tp_layers.layers.together import Together

WIDTH, INNER = 8, 12
PLAN = {"attn.to_q": "colwise", "attn.to_k": "colwise", "attn.to_v": "colwise"}
Tensors = tuple[torch.Tensor, ...]


def usual(attn: Any, x: torch.Tensor) -> Tensors:
    return attn.to_q(x), attn.to_k(x), attn.to_v(x)


class Attention(nn.Module):
    is_cross_attention = False

    def __init__(self, order: Callable[[Any, torch.Tensor], Tensors], bias: bool) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, INNER * (n + 1), bias) for n in range(3))
        self.order, self.fails = order, False

    def forward(self, x: torch.Tensor) -> Tensors:
        return self.order(self, x)


class Model(nn.Module):
    def __init__(self, order: Callable[[Any, torch.Tensor], Tensors] = usual, bias: bool = True) -> None:
        super().__init__()
        self.attn = Attention(order, bias)
        randomise(self)

    def forward(self, x: torch.Tensor) -> Tensors:
        return self.attn(x)


def shard(model: nn.Module, group: Group = Group(), fuse: bool = True) -> Any:  # noqa: B008 (frozen)
    return tp_layers.apply(model, PLAN, group=group, check=False, fuse=fuse)


def weights(model: Any) -> list[torch.Tensor]:
    return [getattr(model.attn, name).weight for name in ("to_q", "to_k", "to_v")]


def equals(model: Any, single: Any, gemms: int, mode: Any = None) -> None:
    """The joined model gives what the same weights give by themselves, with so many GEMMs."""
    with mode or torch.no_grad():
        x = noise(5, WIDTH, dtype=weights(single)[0].dtype)
        wanted = single(x)
        with Functions() as functions:
            found = model(x)
    assert len(found) == len(wanted)
    for got, full in zip(found, wanted, strict=True):
        assert got.dtype == full.dtype
        torch.testing.assert_close(got, full)
    assert functions.counts["linear"] == gemms
    together: Together = model.attn.to_q.together
    assert together.x is None and not together.outputs and not together.call.open
