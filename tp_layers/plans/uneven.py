"""Cuts in whole heads: for sizes that do not divide everything, and for kv heads of which there are fewer than ranks.

Into how many pieces a length is cut follows from the length and the block alone, so that a module which gives a split
tensor and the one which takes it agree:

    in attention                    by its heads; keys and values by its kv heads
    beside it, as long as its heads together, or in one weight with that (an MLP in `[attention | MLP]`)
                                    by the heads too: code that splits by a ratio of the two finds it kept
    elsewhere                       in equal parts where the size divides it, else by the heads beside it or by rows, in
                                    parts that a GEMM takes well
    from whole to whole             in equal parts, else by rows
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from .attention import attentions
from .match import Match
from .scope import Lengths, Scope, lengths_of, scopes_of
from .spec import ShardSpec
from .styles import Divide, Regroup, Style


class Cuts:
    """The cuts that a plan allows of a model, at any size."""

    def __init__(self, model: nn.Module, matches: Sequence[Match]) -> None:
        self._attentions = attentions(model, matches)
        # How often attention modules say that they repeat their kv heads.
        readers = {path: vars(model.get_submodule(path)).get(Regroup.ATTRIBUTE) for path in self._attentions}
        self._readers = {path: count for path, count in readers.items() if count is not None}
        lengths, scopes = map(lengths_of, matches), scopes_of(matches, self._attentions)
        self._places = list(zip(matches, scopes, lengths, strict=True))
        # Blocks are mostly alike: the first stands for all.
        self._distinct: dict[tuple[Scope, Lengths, type[Style]], Match] = {}
        for item, scope, own in self._places:
            self._distinct.setdefault((scope, own, type(item.style)), item)

    def problem(self, size: int, uneven: bool) -> str:
        """Why `size` does not work, with the plan's key; "" if it does."""
        for (scope, lengths, _), item in self._distinct.items():
            try:
                _cut(item, scope, lengths, size, uneven)
            except ValueError as error:
                return f"plan key '{item.key}' at '{item.path}': {error}"
        if self._readers:
            try:
                self.regrouped({item.path: item.style for item, _, _ in self._places}, size, uneven)
            except ValueError as error:
                return str(error)
        return ""

    def matches(self, size: int, uneven: bool) -> list[Match]:
        """The matches, with styles that cut for `size`, which works."""
        return [_cut(item, scope, lengths, size, uneven) for item, scope, lengths in self._places]

    def regrouped(self, styles: Mapping[str, Style], size: int, uneven: bool) -> dict[str, Style]:
        """By the path of an attention module: its style, where several ranks hold a kv head and it counts readers.

        Raises:
            ValueError: it has another style than `Divide`, or repeats its kv heads in a way of its own.
        """
        found: dict[str, Style] = {}
        for path, groups in self._readers.items():
            own, attention = styles.get(path), self._attentions[path]
            if not attention.is_replicated(size):
                continue
            if groups * attention.kv_heads != attention.heads or not isinstance(own, Divide | None):
                raise ValueError(
                    f"'{path}' repeats {attention.kv_heads} kv heads {groups} times for {attention.heads} heads, in a "
                    f"way that is not known, so ranks cannot share them"
                )
            pieces = attention.pieces(size, uneven)
            found[path] = Regroup(own, attention.heads, None if pieces is None else (pieces,))
        return found

    def shared(self, size: int) -> set[int]:
        """The numbers and widths of kv heads that `size` need not divide, as several ranks hold each of them."""
        grouped = [it for it in self._attentions.values() if it.kv_heads < it.heads]
        some = [it for it in grouped if it.is_replicated(size) and size % it.kv_heads == 0]
        return {value for it in some for value in (it.kv_heads, it.kv_heads * it.head_dim)}


def _cut(item: Match, scope: Scope, lengths: Lengths, size: int, uneven: bool) -> Match:
    """The match with a style for `size`.

    Raises:
        ValueError: there is none.
    """
    counts = item.style.counts(item.target) if isinstance(item.target, nn.Module) else {}
    for name, value in counts.items():
        if value % size and value not in {length for _, length in lengths}:
            raise ValueError(f"its {name} of {value} is not divisible by {size} ranks, nor does its style cut it")
    pieces = [scope.pieces(kind, length, size, uneven) for kind, length in lengths]
    if all(count is None for count in pieces):
        return item
    # Beside others, an equal part is a piece.
    granules = [count or size for count in pieces]
    if item.takes or item.style.output == "partial":
        ShardSpec(0, tuple(length for _, length in lengths), tuple(granules)).require_disjoint(size)
    return replace(item, style=item.style.in_granules(granules, item.target))
