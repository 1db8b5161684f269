"""`VocabParallelEmbedding`: a table of embeddings of which each rank holds the rows of its part of the vocabulary."""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from ..collectives import all_reduce
from ..group import Group, GroupLike
from ..plans.spec import ShardSpec
from .options import DEFAULT, Options
from .sharded import ShardedLayer


class VocabParallelEmbedding(ShardedLayer):
    """`ids [..]` of the whole vocabulary -> `y [.., D]`, whole, by one all-reduce.

    A rank looks up the ids that are its own and has zeros for the others, so that each sum has one term that is not
    zero: `y` is exact in every dtype. The cut, of `weight [V, D]` along the vocabulary, is also that of a colwise
    output head, to which the table may be tied.
    """

    def __init__(self, embedding: nn.Embedding, spec: ShardSpec, group: Group, options: Options) -> None:
        super().__init__(embedding, spec, group, options)
        spec.require_disjoint(group.size)
        self.weight = self.cut(embedding.weight)
        self.num_embeddings, self.embedding_dim = embedding.weight.shape
        self.padding_idx = embedding.padding_idx
        self.sparse = embedding.sparse
        ((self.start, self.stop, _),) = spec.ranges(group.rank, group.size)
        scale = getattr(embedding, "embed_scale", None)
        if isinstance(scale, torch.Tensor):
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        *,
        group: GroupLike = None,
        granules: Sequence[int] | None = None,
        options: Options = DEFAULT,
    ) -> "VocabParallelEmbedding":
        """This rank's rows of `embedding`.

        Raises:
            ValueError: `plain_embedding` refuses it, or the vocabulary is not divisible by the group's size or not made
                of its `granules` (see `ShardSpec`), or has fewer of them than there are ranks.
        """
        spec = ShardSpec.of(0, plain_embedding(embedding).weight.shape[0], granules=granules)
        return cls(embedding, spec, Group.of(group), options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """`ids [..]` -> `[.., D]`.

        Raises:
            IndexError: on a CPU, an id is not of the vocabulary. CUDA asserts it, as for the full table.
        """
        mine = (ids >= self.start) & (ids < self.stop)
        # Ids outside of the vocabulary are left as they are, so that they are out of range in the shard too.
        others = ~mine & (ids >= 0) & (ids < self.num_embeddings)
        rows = (ids - self.start).masked_fill(others, 0)
        y = F.embedding(rows, self._own_rows(), self._own_padding(), sparse=self.sparse)
        y = all_reduce(y.masked_fill(others[..., None], 0), self.group)
        if self.embed_scale is None:
            return y
        scale = self.embed_scale
        return y * (scale.to(y.dtype) if isinstance(scale, torch.Tensor) else scale)

    def _own_rows(self) -> torch.Tensor:
        self.check_in_place()
        return self.weight if self.ranges is None else self.spec.view(self.weight, self.group.rank, self.group.size)

    def _own_padding(self) -> int | None:
        """The row of the shard that gets no gradient, if it is this rank's."""
        if self.padding_idx is None or not self.start <= self.padding_idx < self.stop:
            return None
        return self.padding_idx - self.start

    def extra_repr(self) -> str:
        """As `nn.Embedding` prints itself, with the place of the shard."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {self.place}"


def plain_embedding(module: nn.Module) -> nn.Embedding:
    """`module`, if it looks up rows of a plain table and at most scales them by its `embed_scale`.

    Raises:
        ValueError: it is no nn.Embedding, has another forward, or what it does depends on all rows at once.
    """
    name = type(module).__name__
    # transformers has one such class for each model, all alike: the rows times `embed_scale`.
    scaled = name.endswith("ScaledWordEmbedding") and hasattr(module, "embed_scale")
    forward = cast(Callable[..., Any], type(module).forward)
    if not isinstance(module, nn.Embedding) or not (scaled or forward is nn.Embedding.forward):
        raise ValueError(f"it is a {name}, not a plain nn.Embedding")
    if module.max_norm is not None or module.scale_grad_by_freq:
        raise ValueError("it has max_norm or scale_grad_by_freq, which need the whole table")
    return module
