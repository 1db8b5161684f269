"""The heads of an attention module, and into how many pieces they may be cut so that each rank has whole ones."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .heads import HEADS, KV_HEADS, counts_of
from .match import Match
from .spec import ShardSpec
from .styles import Divide


@dataclass(frozen=True)
class Attention:
    """`heads` query heads over `kv_heads` heads of keys and values, of `head_dim` channels (0 where all are as many).

    `problem`: why it cannot be cut unless the size divides both counts; "" if it can.
    """

    heads: int
    kv_heads: int
    head_dim: int = 0
    problem: str = ""

    def pieces(self, size: int, uneven: bool) -> int | None:
        """Into how many pieces the query heads may be cut for `size` ranks; None: into equal parts, one a rank.

        Where each rank has kv heads of its own, the query heads that read one of them stay together.

        Raises:
            ValueError: a rank would have no head, or other heads than those that read its kv heads; or (unless
                `uneven`) not as many as another.
        """
        if self._is_even(size):
            return None
        self._check(size, uneven)
        pieces = self.kv_heads if size <= self.kv_heads else self.heads
        return pieces if pieces % size else None

    def kv_pieces(self, size: int, uneven: bool) -> int | None:
        """The same of keys and values. If they are fewer than ranks, several ranks hold each of them."""
        self.pieces(size, uneven)
        return self.kv_heads if self.kv_heads % size else None

    def pieces_of(self, length: int, size: int, uneven: bool) -> int | None:
        """The same of a dim of `length` that goes by heads: channels, heads, or an MLP in one weight with them.

        Raises:
            ValueError: as `pieces`, or it is not made of as many parts.
        """
        if self.holds_kv(length):
            return self.kv_pieces(size, uneven)
        if self._is_even(size) and length % size == 0:
            return None
        if length % self.heads:
            raise ValueError(f"{length} does not consist of {self.heads} heads, nor is it divisible by {size} ranks")
        return self.pieces(size, uneven)

    def holds_kv(self, length: int) -> bool:
        """Whether a dim of `length` is that of keys or values, where these have fewer heads."""
        return self.kv_heads != self.heads and length == self.kv_heads * self.head_dim

    def is_replicated(self, size: int) -> bool:
        """Whether several ranks hold a kv head."""
        return size > self.kv_heads

    def _is_even(self, size: int) -> bool:
        return self.heads % size == 0 and self.kv_heads % size == 0

    def _check(self, size: int, uneven: bool) -> None:
        if self.problem:
            raise ValueError(self.problem)
        if self.heads < size:
            raise ValueError(f"its {self.heads} heads are fewer than {size} ranks")
        if self.heads % size and not uneven:
            raise ValueError(f"its {self.heads} heads are not divisible by {size} ranks")
        if not self.is_replicated(size):
            if not uneven:
                raise ValueError(f"its {self.kv_heads} kv heads are not divisible by {size} ranks")
            return
        if size % self.kv_heads:
            raise ValueError(f"its {self.kv_heads} kv heads are not shared evenly by {size} ranks")
        queries, kv = (ShardSpec(0, (self.heads,), (count,)) for count in (self.heads, self.kv_heads))
        for rank in range(size):
            own, held = queries.ranges(rank, size)[0], kv.ranges(rank, size)[0]
            if own.start < held.start or own.stop > held.stop:
                raise ValueError(
                    f"query heads {own.start} to {own.stop - 1} of {self.heads}, those of rank {rank} of {size}, read "
                    f"more than one of the {self.kv_heads} kv heads"
                )


def attentions(model: nn.Module, matches: Sequence[Match]) -> dict[str, Attention]:
    """By its path, every module that counts heads and whose own projections are split, or whose counts are divided."""
    splits: dict[str, set[int]] = {}
    for item in matches:
        if item.splits:
            splits.setdefault(item.path.rpartition(".")[0], set()).update(item.style.lengths(item.target))
        elif isinstance(item.style, Divide) and set(item.style.attributes) & set(HEADS):
            splits.setdefault(item.path, set())
    found = {}
    for path, lengths in splits.items():
        module = model.get_submodule(path)
        counts = counts_of(model, module)[1]
        heads = {value for name, value in counts.items() if name in HEADS}
        if heads:
            kv_heads = {value for name, value in counts.items() if name in KV_HEADS} or heads
            found[path] = _attention(module, heads, kv_heads, lengths)
    return found


def _attention(module: nn.Module, heads: set[int], kv_heads: set[int], lengths: set[int]) -> Attention:
    query, kv = max(heads), max(kv_heads)
    if len(heads) > 1 or len(kv_heads) > 1:
        return Attention(query, kv, 0, f"it counts {sorted(heads)} heads and {sorted(kv_heads)} kv heads")
    if query == kv:
        return Attention(query, kv)
    if query % kv:
        return Attention(query, kv, 0, f"its {query} heads do not share {kv} kv heads evenly")
    own = getattr(module, "head_dim", None)
    head_dim = own if isinstance(own, int) else max(lengths, default=0) // query
    problem = f"none of its projections has the width of its {kv} kv heads of {head_dim} channels"
    return Attention(query, kv, head_dim, "" if kv * head_dim in lengths else problem)
