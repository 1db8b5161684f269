"""The norms of queries and of keys across ranks, their sums of squares in one all-reduce.

A processor calls `to_q`, `to_k`, `norm_q`, `norm_k`, in this order. So when `norm_q` runs, the tensor that `norm_k`
will be called with is known: `norm_q` reduces the squares of both, and `norm_k` takes its part if it is called with
that very tensor, unchanged. In any other order, with another tensor or a changed one, each norm reduces its own.
"""

from typing import Any

import torch
from torch import nn

from .norm import AcrossRMSNorm

ALWAYS_CALLED = -1


class Pair:
    """What the two norms of an attention module know of each other within one call of it; nothing between calls."""

    def __init__(self, norm_q: AcrossRMSNorm, norm_k: AcrossRMSNorm) -> None:
        self.key: torch.Tensor | None = None
        self.squares: torch.Tensor | None = None
        self.version = -1
        norm_q.together, norm_k.together = self.of_queries, self.of_keys

    def of_queries(self, norm: AcrossRMSNorm, query: torch.Tensor) -> torch.Tensor:
        """The squares of `query [.., D / size]` summed over all ranks, `[.., 1]`; those of the keys along with them."""
        mine, key = norm.squares(query), self.key
        if key is None or self.squares is not None or not _counts_changes(key):
            return norm.reduced(mine)
        others = norm.squares(key)
        if others.dtype != mine.dtype or others.device != mine.device:
            return norm.reduced(mine)
        both = norm.reduced(torch.cat([mine.flatten(), others.flatten()]))
        total, rest = both.split([mine.numel(), others.numel()])
        self.squares = rest.view_as(others)
        if torch.compiler.is_compiling():
            torch._dynamo.comptime.comptime(_note_version)
        else:
            self.version = key._version
        return total.view_as(mine)

    def of_keys(self, norm: AcrossRMSNorm, key: torch.Tensor) -> torch.Tensor:
        """The squares of `key [.., D / size]` summed over all ranks, `[.., 1]`."""
        squares = self.squares if key is self.key else None
        self.clear()
        if squares is not None and torch.compiler.is_compiling():
            torch._dynamo.comptime.comptime(_check_version)
        elif squares is not None and key._version != self.version:
            squares = None
        return norm.reduced(norm.squares(key)) if squares is None else squares

    def clear(self) -> None:
        """Forgets the call."""
        self.key = self.squares = None


def _counts_changes(key: torch.Tensor) -> bool:
    """Whether a change of `key` in place would be noticed: not in inference mode."""
    return torch.compiler.is_compiling() or not key.is_inference()


def _note_version(context: Any) -> None:
    """While `of_queries` is traced, in which the number of changes is no number yet."""
    key = context.get_local("key").as_fake()
    key.tp_layers_version = key._version


def _check_version(context: Any) -> None:
    """While `of_keys` is traced: what it computes can no longer depend on the answer."""
    key = context.get_local("key").as_fake()
    if key._version != key.tp_layers_version:
        raise ValueError("the keys are changed in place between norm_q and norm_k, which cannot be compiled: copy them")


class _Record:
    """The forward hook of the keys' projection."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self.pair.clear()
        self.pair.key = output


class _Clear:
    """The hook before a call of the attention module, and after it, even if it raises."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def __call__(self, *args: Any) -> None:
        self.pair.clear()


def pair_norms(attention: nn.Module) -> None:
    """From now on `norm_q` and `norm_k` of `attention` share an all-reduce, where its processor lets them.

    Raises:
        ValueError: one of the two is no `AcrossRMSNorm`.
    """
    norm_q, norm_k = attention.get_submodule("norm_q"), attention.get_submodule("norm_k")
    if not (isinstance(norm_q, AcrossRMSNorm) and isinstance(norm_k, AcrossRMSNorm)):
        raise ValueError("only two norms across ranks are reduced together")
    pair = Pair(norm_q, norm_k)
    attention.get_submodule("to_k").register_forward_hook(_Record(pair))
    attention.register_forward_pre_hook(_Clear(pair))
    # Under a key that is no number of torch's: that is another for every block, and compiled code asks for it, so that
    # each of a model's blocks would be compiled anew.
    attention._forward_hooks[ALWAYS_CALLED] = _Clear(pair)
    attention._forward_hooks_always_called[ALWAYS_CALLED] = True
