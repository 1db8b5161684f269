"""Small models that are exact in small integers, and a cut of their parameters written out by hand."""

import torch
from torch import nn

from seeded import integers


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Scaled(Pair):
    """The channels between the two layers have a scale and a table of their own."""

    def __init__(self):
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(3, 12))

    def forward(self, x):
        return self.down(self.up(x) * self.scale + self.table)


class Fused(nn.Module):
    """q, k, v and an MLP of twice their width in one projection; attention and MLP side by side in the other."""

    def __init__(self):
        super().__init__()
        self.fused, self.out = nn.Linear(8, 40), nn.Linear(24, 4)
        self.fused._tp_packed_col_blocks, self.out._tp_packed_row_blocks = [8, 8, 8, 16], [8, 16]

    def forward(self, x):
        h = self.fused(x)
        width = h.shape[-1] // 5
        q, k, v, mlp = h.split([width, width, width, 2 * width], dim=-1)
        return self.out(torch.cat([q * k + v, mlp.relu()], dim=-1))


class ScaleNorm(nn.Module):
    """A norm's weight without the norm."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Attention(nn.Module):
    """Linear attention of 8 heads over 4 key and value heads, with norms within a head, before and after it."""

    def __init__(self):
        super().__init__()
        self.heads, self.kv_heads = 8, 4
        self.before, self.norm_q, self.norm_k, self.after = (ScaleNorm(width) for width in (8, 2, 2, 4))
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)
        )  # fmt: skip

    def forward(self, x):
        x = self.before(x)
        q = self.norm_q(self.to_q(x).unflatten(-1, (self.heads, 2)))
        k = self.norm_k(self.to_k(x).unflatten(-1, (self.kv_heads, 2)))
        v = self.to_v(x).unflatten(-1, (self.kv_heads, 2))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=-2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        return self.after(self.to_out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(-2)))


class Table(nn.Module):
    def forward(self, x):
        return torch.arange(12.0, dtype=x.dtype) % 5 - 2, (torch.arange(12.0, dtype=x.dtype) % 3, "a name")


class Rotary(Pair):
    """A table over the full width, of which each rank needs its channels."""

    def __init__(self):
        super().__init__()
        self.rope = Table()

    def forward(self, x):
        cos, (sin, _) = self.rope(x)
        h = self.up(x)
        return self.down(h * cos + sin)


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.reader = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.reader(self.linear(x))


PAIR = {"up": "colwise", "down": "rowwise"}
PAIR_CUTS = {"up.weight": (0, [12]), "up.bias": (0, [12]), "down.weight": (1, [12])}


def cut(full, dim, blocks, rank, size):
    """This rank's part of every block, by hand."""
    return torch.cat([block.chunk(size, dim)[rank] for block in full.split(blocks, dim)], dim)


def small_integers(*shape, seed):
    """So small that the products of several layers are exact in float64."""
    return integers(*shape, seed=seed, most=2, dtype=torch.float64)
