"""Attention whose query heads share heads of keys and values, with everything around it that goes by heads."""

import torch
from torch import nn

from tp_layers import Divide, PackedColwiseParallel, ShardParameter, SliceOutput

WIDTH, CHANNELS = 14, 5


class Table(nn.Module):
    """Something like a rotary table, for the channels of all query heads."""

    def __init__(self, heads):
        super().__init__()
        self.channels = heads * CHANNELS

    def forward(self, x):
        return torch.linspace(0.5, 1.5, self.channels, dtype=x.dtype)


class Attention(nn.Module):
    """A norm within a head of q and one across all heads of k; a bias for each kv head; a gate for each query head."""

    def __init__(self, heads, kv_heads):
        super().__init__()
        self.heads, self.kv_heads, self.num_key_value_groups = heads, kv_heads, heads // kv_heads
        self.to_q, self.to_k = nn.Linear(WIDTH, heads * CHANNELS), nn.Linear(WIDTH, kv_heads * CHANNELS)
        self.to_v, self.to_out = nn.Linear(WIDTH, kv_heads * CHANNELS), nn.Linear(heads * CHANNELS, WIDTH)
        self.norm_q, self.norm_k = nn.RMSNorm(CHANNELS, eps=1e-6), nn.RMSNorm(kv_heads * CHANNELS, eps=1e-6)
        self.gate = nn.Parameter(torch.ones(heads))
        # In a module that is never called.
        self.more = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(1, kv_heads * CHANNELS))})

    def repeats(self):
        """How many query heads read a kv head."""
        raise NotImplementedError

    def forward(self, x, table):
        q = self.norm_q((self.to_q(x) * table).unflatten(-1, (-1, CHANNELS)))
        k, v = self.norm_k(self.to_k(x)), self.to_v(x) + self.more["shift"]
        k, v = (t.unflatten(-1, (-1, CHANNELS)).repeat_interleave(self.repeats(), -2) for t in (k, v))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1) * self.gate[:, None, None]
        return self.to_out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))


class Counted(Attention):
    """Reads its numbers of heads, as attention of diffusers does."""

    def repeats(self):
        return self.heads // self.kv_heads


class Told(Attention):
    """Reads how many query heads share a kv head, as attention of transformers does."""

    def repeats(self):
        return self.num_key_value_groups


class Block(nn.Module):
    """Attention, then a gated MLP of a width that no size divides."""

    def __init__(self, kind, heads, kv_heads):
        super().__init__()
        self.attn = kind(heads, kv_heads)
        self.gate_up, self.down = nn.Linear(WIDTH, 2 * 13), nn.Linear(13, WIDTH)

    def forward(self, x, table):
        x = x + self.attn(x, table)
        gate, up = self.gate_up(x).chunk(2, -1)
        return x + self.down(gate.sigmoid() * up)


class Grouped(nn.Module):
    def __init__(self, kind, heads, kv_heads):
        super().__init__()
        self.rope = Table(heads)
        self.blocks = nn.ModuleList(Block(kind, heads, kv_heads) for _ in range(2))

    def forward(self, x):
        table = self.rope(x)
        for block in self.blocks:
            x = block(x, table)
        return x


def plan(kind, feed_forward=True):
    """Of a `Grouped` model: what is divided is what its attention reads. The MLP needs `uneven`, or to stay whole."""
    mlp = {"blocks.*.gate_up": PackedColwiseParallel([1, 1]), "blocks.*.down": "rowwise"}
    return {
        **({"blocks.*.attn": Divide("heads", "kv_heads")} if kind is Counted else {}),
        **{f"blocks.*.attn.to_{name}": "colwise" for name in "qkv"},
        "blocks.*.attn.to_out": "rowwise",
        "blocks.*.attn.norm_k": "rms_norm",
        "blocks.*.attn.more.shift": ShardParameter(1),
        "blocks.*.attn.gate": ShardParameter(0),
        "rope": SliceOutput(-1),
        **(mlp if feed_forward else {}),
    }
