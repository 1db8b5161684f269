"""How one parameter is sharded: the only index arithmetic in the package.

A `ShardSpec` cuts one dim of a full tensor. The dim is made of `blocks` (the fused projections of a packed weight, or
a single block), and every block is cut into `size` equal ranges, one for each rank:

    full   [ q q q q | k k k k | v v v v ]      blocks (4, 4, 4)
    rank 0 [ q q | k k | v v ]                  size 2
    rank 1 [ q q | k k | v v ]

`take` and `merge` are each other's inverse: `merge([take(full, r, size) for r in range(size)]) == full`, bit for bit.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch


class Range(NamedTuple):
    """Rows `start:stop` of the full dim, held by one rank from row `at` of its shard on (`overlap`: of a shard)."""

    start: int
    stop: int
    at: int


@dataclass(frozen=True)
class ShardSpec:
    """The cut of one tensor along `dim` (negative counts from the end), whose extent is `sum(blocks)`."""

    dim: int
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, dim: int, length: int, blocks: Sequence[int] | None = None) -> "ShardSpec":
        """A spec for a dim of `length`, whose `blocks` are proportions or absolute sizes (default: one block).

        Raises:
            ValueError: a block is not a positive integer, or the blocks' sum does not divide `length`.
        """
        parts = list(blocks) if blocks is not None else [1]
        if not parts or any(not isinstance(part, int) or isinstance(part, bool) or part < 1 for part in parts):
            raise ValueError(f"blocks must be positive integers, got {parts}")
        unit, rest = divmod(length, sum(parts))
        if rest or not unit:
            raise ValueError(f"the blocks {parts} add up to {sum(parts)}, which does not divide {length}")
        return cls(dim, tuple(part * unit for part in parts))

    @property
    def length(self) -> int:
        """The full extent of the dim."""
        return sum(self.blocks)

    def ranges(self, rank: int, size: int) -> list[Range]:
        """What `rank` of `size` holds, block by block.

        Raises:
            ValueError: a block is not divisible by `size`.
        """
        found, offset, at = [], 0, 0
        for block in self.blocks:
            part, rest = divmod(block, size)
            if rest:
                raise ValueError(f"a block of {block} along dim {self.dim} is not divisible by {size} ranks")
            start = offset + rank * part
            found.append(Range(start, start + part, at))
            offset, at = offset + block, at + part
        return found

    def overlap(self, rank: int, size: int, stored: "ShardSpec", stored_rank: int, stored_size: int) -> list[Range]:
        """What `rank` of `size` takes from a shard that was cut by `stored` for `stored_rank` of `stored_size`.

        Rows `start:stop` are those of the stored shard, and `at` is the row of this rank's own shard where they go.
        Over all stored ranks, every row of the own shard comes once. A whole tensor is one shard of one block.

        Raises:
            ValueError: the specs cut another dim or another length, or a block is not divisible by its size.
        """
        if (self.dim, self.length) != (stored.dim, stored.length):
            raise ValueError(f"{stored} was cut from another tensor, or along another dim, than {self} cuts")
        found = []
        for start, stop, at in self.ranges(rank, size):
            for first, last, position in stored.ranges(stored_rank, stored_size):
                low, high = max(start, first), min(stop, last)
                if low < high:
                    found.append(Range(position + low - first, position + high - first, at + low - start))
        return found

    def local_shape(self, shape: Sequence[int], size: int) -> tuple[int, ...]:
        """The shape of one rank's shard of a tensor of `shape`."""
        local = list(shape)
        local[self.dim] = sum(stop - start for start, stop, _ in self.ranges(0, size))
        return tuple(local)

    def full_shape(self, local: Sequence[int]) -> tuple[int, ...]:
        """The shape of the tensor that shards of shape `local` were cut from."""
        full = list(local)
        full[self.dim] = self.length
        return tuple(full)

    def pieces(
        self, full: torch.Tensor, shard: torch.Tensor, rank: int, size: int
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        """Pairs of views, of `full` and of `rank`'s `shard`, that stand for the same elements."""
        if full.shape[self.dim] != self.length:
            raise ValueError(f"dim {self.dim} has {full.shape[self.dim]} entries, the spec was made for {self.length}")
        if tuple(shard.shape) != self.local_shape(full.shape, size):
            # copy_ would broadcast a shard that is too small.
            raise ValueError(f"{tuple(shard.shape)} is no shard of {tuple(full.shape)} over {size} ranks")
        for start, stop, at in self.ranges(rank, size):
            count = stop - start
            yield full.narrow(self.dim, start, count), shard.narrow(self.dim, at, count)

    def view(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """`rank`'s shard: a view of `full` where the spec has one block, a new tensor otherwise."""
        if len(self.blocks) > 1:
            return self.take(full, rank, size)
        start, stop, _ = self.ranges(rank, size)[0]
        return full.narrow(self.dim, start, stop - start)

    def take(self, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """`rank`'s shard of `full`: contiguous, with storage of its own."""
        shard = full.new_empty(self.local_shape(full.shape, size))
        for source, target in self.pieces(full, shard, rank, size):
            target.copy_(source)
        return shard

    def put(self, shard: torch.Tensor, full: torch.Tensor, rank: int, size: int) -> None:
        """Writes `rank`'s `shard` to its place in `full`."""
        for target, source in self.pieces(full, shard, rank, size):
            target.copy_(source)

    def merge(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full tensor from the shards of all ranks, in rank order."""
        full = shards[0].new_empty(self.full_shape(shards[0].shape))
        for rank, shard in enumerate(shards):
            self.put(shard, full, rank, len(shards))
        return full
