"""How one parameter is sharded: the only index arithmetic in the package.

A `ShardSpec` cuts one dim of a full tensor. The dim is made of `blocks` (the fused projections of a packed weight, or
a single block), and every block is cut into `size` equal ranges, one for each rank:

    full   [ q q q q | k k k k | v v v v ]      blocks (4, 4, 4)
    rank 0 [ q q | k k | v v ]                  size 2
    rank 1 [ q q | k k | v v ]

With `granules`, a block consists of so many equal pieces that stay whole, such as heads. Each rank holds a run of them,
the first ranks one more than the last:

    full   [ a a b b c c ]                      blocks (6,), granules (3,)
    rank 0 [ a a b b ]                          size 2
    rank 1 [ c c ]

A block of fewer granules than ranks is replicated: each granule is held by as many ranks, next to each other.

    full   [ a a b b ]                          blocks (4,), granules (2,)
    rank 0 [ a a ]   rank 1 [ a a ]             size 4
    rank 2 [ b b ]   rank 3 [ b b ]

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

    @property
    def held(self) -> tuple[int, int]:
        """The first of these rows in the shard, and the one after the last."""
        return self.at, self.at + self.stop - self.start


@dataclass(frozen=True)
class ShardSpec:
    """The cut of one tensor along `dim` (negative counts from the end), whose extent is `sum(blocks)`.

    `granules`: of each block, into how many equal pieces it may be cut; None: into as many as there are ranks.
    """

    dim: int
    blocks: tuple[int, ...]
    granules: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls, dim: int, length: int, blocks: Sequence[int] | None = None, granules: Sequence[int] | None = None
    ) -> "ShardSpec":
        """A spec for a dim of `length`, whose `blocks` are proportions or absolute sizes (default: one block).

        Raises:
            ValueError: a block is not a positive integer, the blocks' sum does not divide `length`, or a block does not
                consist of so many granules.
        """
        parts = list(blocks) if blocks is not None else [1]
        if not parts or any(not isinstance(part, int) or isinstance(part, bool) or part < 1 for part in parts):
            raise ValueError(f"blocks must be positive integers, got {parts}")
        unit, rest = divmod(length, sum(parts))
        if rest or not unit:
            raise ValueError(f"the blocks {parts} add up to {sum(parts)}, which does not divide {length}")
        sizes = tuple(part * unit for part in parts)
        if granules is None:
            return cls(dim, sizes)
        counts = list(granules) if len(granules) == len(sizes) else [0]
        if any(count < 1 or size % count for size, count in zip(sizes, counts, strict=False)):
            raise ValueError(f"the blocks {list(sizes)} do not consist of {list(granules)} equal pieces")
        return cls(dim, sizes, tuple(granules))

    @property
    def length(self) -> int:
        """The full extent of the dim."""
        return sum(self.blocks)

    def ranges(self, rank: int, size: int) -> list[Range]:
        """What `rank` of `size` holds, block by block.

        Raises:
            ValueError: a block is not divisible by `size`, or has fewer granules and `size` is no multiple of them.
        """
        found, offset, at = [], 0, 0
        for block, granules in self._counted(size):
            unit, rest = divmod(block, granules)
            if rest:
                parts = f"made of {granules} equal pieces" if self.granules else f"divisible by {size} ranks"
                raise ValueError(f"a block of {block} along dim {self.dim} is not {parts}")
            first, last = _run(granules, rank, size)
            found.append(Range(offset + first * unit, offset + last * unit, at))
            offset, at = offset + block, at + (last - first) * unit
        return found

    def owned(self, rank: int, size: int) -> list[Range]:
        """The `ranges` of which `rank` is the first holder: over all ranks, every row of the full dim comes once."""
        ranges = zip(self.ranges(rank, size), self._counted(size), strict=True)
        return [it for it, (_, granules) in ranges if granules >= size or rank % (size // granules) == 0]

    def copies(self, size: int) -> int:
        """How many of `size` ranks hold a row, of the block of which it is the most."""
        return max(1, *(size // granules for _, granules in self._counted(size)))

    def require_disjoint(self, size: int) -> None:
        """Raises ValueError if several of `size` ranks hold a row, which a sum over the ranks would have as often."""
        if self.copies(size) > 1:
            counts = f"{list(self.blocks)} in {list(self.granules or ())} granules"
            raise ValueError(
                f"{counts} over {size} ranks: {self.copies(size)} of them would hold and sum the same rows"
            )

    def _counted(self, size: int) -> Iterator[tuple[int, int]]:
        """Every block with the number of pieces that it is cut into at most."""
        return zip(self.blocks, self.granules or (size,) * len(self.blocks), strict=True)

    def overlap(self, rank: int, size: int, stored: "ShardSpec", stored_rank: int, stored_size: int) -> list[Range]:
        """What `rank` of `size` takes from a shard that was cut by `stored` for `stored_rank` of `stored_size`.

        Rows `start:stop` are those of the stored shard, and `at` is the row of this rank's own shard where they go.
        Over all stored ranks, every row of the own shard comes once, from its first holder. A whole tensor is one shard
        of one block.

        Raises:
            ValueError: the specs cut another dim or another length, or a block is not divisible by its size.
        """
        if (self.dim, self.length) != (stored.dim, stored.length):
            raise ValueError(f"{stored} was cut from another tensor, or along another dim, than {self} cuts")
        found = []
        for start, stop, at in self.ranges(rank, size):
            for first, last, position in stored.owned(stored_rank, stored_size):
                low, high = max(start, first), min(stop, last)
                if low < high:
                    found.append(Range(position + low - first, position + high - first, at + low - start))
        return found

    def extent(self, rank: int, size: int) -> int:
        """How long the dim is in the shard of `rank`."""
        return sum(stop - start for start, stop, _ in self.ranges(rank, size))

    def longest(self, size: int) -> int:
        """The extent of the largest shard, which is rank 0's: of no block has another rank more."""
        return self.extent(0, size)

    def is_even(self, size: int) -> bool:
        """Whether all shards are of one extent."""
        return self.extent(0, size) == self.extent(size - 1, size)

    def local_shape(self, shape: Sequence[int], rank: int, size: int) -> tuple[int, ...]:
        """The shape of `rank`'s shard of a tensor of `shape`."""
        local = list(shape)
        local[self.dim] = self.extent(rank, size)
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
        if tuple(shard.shape) != self.local_shape(full.shape, rank, size):
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
        shard = full.new_empty(self.local_shape(full.shape, rank, size))
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

    def pad(self, shard: torch.Tensor, size: int) -> torch.Tensor:
        """The shard of any rank, followed by zeros up to the extent of the largest; itself if that is its own."""
        shape = list(shard.shape)
        shape[self.dim] = self.longest(size)
        if shape == list(shard.shape):
            return shard
        padded = shard.new_zeros(shape)
        padded.narrow(self.dim, 0, shard.shape[self.dim]).copy_(shard)
        return padded

    def trim(self, padded: torch.Tensor, rank: int, size: int) -> torch.Tensor:
        """`rank`'s shard, a view of what `pad` made of it."""
        return padded.narrow(self.dim, 0, self.extent(rank, size))


def _run(pieces: int, rank: int, size: int) -> tuple[int, int]:
    """The first of `pieces` equal pieces that `rank` holds, and the one after its last."""
    each, rest = divmod(pieces, size)
    if each:
        first = rank * each + min(rank, rest)
        return first, first + each + (rank < rest)
    if size % pieces:
        raise ValueError(f"{pieces} pieces that stay whole cannot be shared evenly by {size} ranks")
    first = rank * pieces // size
    return first, first + 1
