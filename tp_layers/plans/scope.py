"""By whose heads a length is cut: it follows from the length, and from the attention around or beside a module."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .attention import Attention
from .heads import HEADS, KV_HEADS
from .match import Match
from .styles import Divide, SliceOutput

# What a length is: a number of heads; or channels of what gives or takes a split tensor or gives a partial sum, of what
# works on a part of one (a norm, a parameter), or of a module whose input and output are whole.
COUNT, KV_COUNT, PROJECTION, BETWEEN, WHOLE = "heads", "kv heads", "projection", "between", "whole"
# How many rows stay together where no heads say so, and what a part should be a multiple of: 16 bytes of bfloat16. Over
# other widths a GEMM is slow, and a grouped one refuses.
TOGETHER, ALIGNED = (64, 8, 1), 8

Lengths = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class Scope:
    """Where a module stands: inside an attention module, or beside some.

    `joined`: the lengths beside attention that are cut by heads, with whose; `others`: of other projections there.
    """

    attentions: tuple[Attention, ...] = ()
    inside: bool = False
    joined: tuple[tuple[int, frozenset[Attention]], ...] = ()
    others: frozenset[int] = frozenset()

    def pieces(self, kind: str, length: int, size: int, uneven: bool) -> int | None:
        """Into how many pieces `length` may be cut for `size` ranks; None: into equal parts, one a rank.

        Raises:
            ValueError: it cannot be cut for them, or not without `uneven`, or it is not known by whose heads.
        """
        answers = {_answer(it, kind, length, size, uneven) for it in self._owners(kind, length)}
        if len(answers) > 1:
            counts = sorted({it.heads for it in self.attentions})
            raise ValueError(
                f"it stands beside attention modules of {counts} heads, and it is not known whose to follow"
            )
        if answers:
            return answers.pop()
        if length % size == 0:
            return None
        free = kind in (PROJECTION, WHOLE) or length in self.others
        if not uneven or length < size or not free:
            unknown = "" if free else ", and it is not known by whose heads to cut it"
            raise ValueError(f"{length} is not divisible by {size} ranks{unknown}")
        by_heads = [] if kind == WHOLE else [it.heads for it in self.attentions if length % it.heads == 0]
        by_rows = [length // rows for rows in TOGETHER if length % rows == 0]
        counts = [count for count in (*by_heads, *by_rows) if count >= size]
        return next((count for count in counts if length // count % ALIGNED == 0), counts[0])

    def _owners(self, kind: str, length: int) -> Sequence[Attention] | frozenset[Attention]:
        if kind == WHOLE:
            return ()
        if self.inside or kind in (COUNT, KV_COUNT):
            return self.attentions
        owners = dict(self.joined).get(length, frozenset())
        if owners or kind == PROJECTION or length in self.others:
            return owners
        return [it for it in self.attentions if length % it.heads == 0]


def _answer(attention: Attention, kind: str, length: int, size: int, uneven: bool) -> int | None:
    if kind in (COUNT, KV_COUNT):
        return attention.pieces(size, uneven) if kind == COUNT else attention.kv_pieces(size, uneven)
    pieces = attention.pieces_of(length, size, uneven)
    if kind == BETWEEN and pieces is not None and attention.holds_kv(length) and length == attention.heads:
        raise ValueError(f"{length} is both the number of heads and the width of the kv heads: it is not known which")
    return pieces


def lengths_of(item: Match) -> Lengths:
    """What is cut in the planned module, in the order of its style's granules: kind and length of each."""
    if isinstance(item.style, SliceOutput):
        # How long the tables are shows when they are made.
        return ((COUNT, 0),)
    if isinstance(item.style, Divide):
        kinds = [KV_COUNT if it in KV_HEADS else COUNT if it in HEADS else BETWEEN for it in item.style.attributes]
        return tuple(zip(kinds, item.style.lengths(item.target), strict=True))
    kind = WHOLE if (item.style.input, item.style.output) == ("whole", "whole") else BETWEEN
    kind = PROJECTION if item.splits or item.takes or item.style.output == "partial" else kind
    return tuple((kind, length) for length in item.style.lengths(item.target))


def scopes_of(matches: Sequence[Match], attentions: Mapping[str, Attention]) -> list[Scope]:
    """The scope of each match: of the nearest place, at or above it, that is an attention module or holds one."""
    within: dict[str, list[Attention]] = {}
    for path, attention in attentions.items():
        for place in _places(path):
            within.setdefault(place, []).append(attention)
    anchors = [next((place for place in _places(item.path) if place in within), "") for item in matches]
    # By place: the lengths of what attention within it gives, with whose; and those of each projection beside it.
    given: dict[str, dict[int, set[Attention]]] = {}
    beside: dict[str, list[list[int]]] = {}
    for item, anchor in zip(matches, anchors, strict=True):
        lengths = [length for kind, length in lengths_of(item) if kind == PROJECTION]
        if anchor not in attentions:
            beside.setdefault(anchor, []).append(lengths)
        elif item.splits:
            for place in _places(anchor):
                for length in lengths:
                    if not attentions[anchor].holds_kv(length):
                        given.setdefault(place, {}).setdefault(length, set()).add(attentions[anchor])
    scopes = {place: Scope((attention,), inside=True) for place, attention in attentions.items()}
    for place, projections in beside.items():
        own = dict.fromkeys(within.get(place, ()))
        scopes[place] = _around(tuple(own), given.get(place, {}), projections)
    return [scopes[anchor] for anchor in anchors]


def _around(attentions: tuple[Attention, ...], given: dict[int, set[Attention]], projections: list[list[int]]) -> Scope:
    joined = {length: frozenset(own) for length, own in given.items()}
    for lengths in projections:
        own = frozenset[Attention]().union(*(given.get(length, ()) for length in lengths))
        if own:
            joined.update({length: joined.get(length, frozenset()) | own for length in lengths})
    others = frozenset(length for lengths in projections for length in lengths if length not in joined)
    return Scope(attentions, False, tuple(sorted(joined.items(), key=lambda it: it[0])), others)


def _places(path: str) -> Iterator[str]:
    """`path`, and every path above it, the nearest first."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""
