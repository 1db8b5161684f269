"""Attention modules that call the norms of their queries and keys in every order there is."""

import torch
from torch import nn

from close import randomise
from seeded import noise

WIDTH, INNER = 8, 12
PLAN = {
    "attn.to_q": "colwise",
    "attn.to_k": "colwise",
    "attn.norm_q": "rms_norm",
    "attn.norm_k": "rms_norm",
    "attn.to_out": "rowwise",
}


def usual(attn, x, y):
    """As every processor of diffusers does."""
    q, k = attn.to_q(x), attn.to_k(y)
    return attn.norm_q(q), attn.norm_k(k)


def keys_first(attn, x, y):
    q, k = attn.to_q(x), attn.to_k(y)
    k = attn.norm_k(k)
    return attn.norm_q(q), k


def one_by_one(attn, x, y):
    return attn.norm_q(attn.to_q(x)), attn.norm_k(attn.to_k(y))


def another_tensor(attn, x, y):
    q, k = attn.to_q(x), attn.to_k(y)
    return attn.norm_q(q), attn.norm_k(k * torch.linspace(0.5, 2, k.shape[1])[:, None])


def changed_in_place(attn, x, y):
    q, k = attn.to_q(x), attn.to_k(y)
    q = attn.norm_q(q)
    k[:, 1:] *= 3
    return q, attn.norm_k(k)


def changed_before(attn, x, y):
    q, k = attn.to_q(x), attn.to_k(y)
    k[:, 1:] *= 3
    return attn.norm_q(q), attn.norm_k(k)


def projected_again(attn, x, y):
    q, k = attn.to_q(x), attn.to_k(y)
    q = attn.norm_q(q)
    return q, attn.norm_k(attn.to_k(y * 2)) + k


def queries_twice(attn, x, y):
    q, k = attn.to_q(x), attn.to_k(y)
    return attn.norm_q(q) + attn.norm_q(q * torch.linspace(0.5, 2, q.shape[1])[:, None]), attn.norm_k(k)


def keys_not_normed(attn, x, y):
    return attn.norm_q(attn.to_q(x)), attn.to_k(y)


def other_dtype(attn, x, y):
    q, k = attn.to_q(x), attn.to_k(y)
    return attn.norm_q(q.double()).float(), attn.norm_k(k)


def halfway(attn, x, y):
    q, k = attn.to_q(x), attn.to_k(y)
    q = attn.norm_q(q)
    if attn.fails:
        raise RuntimeError("between the norms")
    return q, attn.norm_k(k)


# How a processor may call the norms, and how many all-reduces they then are.
ORDERS = {
    usual: 1, keys_first: 2, one_by_one: 2, another_tensor: 2, changed_before: 1, projected_again: 2, queries_twice: 2,
    keys_not_normed: 1, other_dtype: 2,
}  # fmt: skip


class Attention(nn.Module):
    """Scores of the normed queries against the normed keys, of as many other rows."""

    def __init__(self, order):
        super().__init__()
        self.to_q, self.to_k = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER)
        self.norm_q, self.norm_k = nn.RMSNorm(INNER), nn.RMSNorm(INNER)
        self.to_out, self.order, self.fails = nn.Linear(INNER, 5), order, False

    def forward(self, x, y):
        q, k = self.order(self, x, y)
        return self.to_out(q * k.relu().mean(1, keepdim=True))


class Around(nn.Module):
    def __init__(self, order):
        super().__init__()
        self.attn = Attention(order)

    def forward(self, x, y):
        return self.attn(x, y)


def build(order):
    return randomise(Around(order))


def inputs():
    """Rows for queries, and other rows for keys."""
    return noise(2, 5, WIDTH, seed=1), noise(2, 3, WIDTH, seed=2)


def train(model):
    """The output and all gradients."""
    model.zero_grad()
    x, y = (rows.requires_grad_() for rows in inputs())
    out = model(x, y)
    out.square().sum().backward()
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [out.detach(), x.grad, y.grad, *[grad.clone() for grad in grads]]
