"""ShardSpec in whole granules: unequal runs of them, granules that several ranks hold, and shards of both cut anew."""

from itertools import product

import pytest
import torch

from tp_layers.plans.spec import Range, ShardSpec

# Length, blocks, granules. Sizes that no block allows are left out by `sizes_of`.
CUTS = {
    "38 heads": (38 * 3, None, [38]),
    "heads and an MLP": (6 * 5 + 6 * 7, [30, 42], [6, 6]),
    "grouped qkv": (8 * 3 + 2 * 3 + 2 * 3, [24, 6, 6], [8, 2, 2]),
    "one kv head": (6 * 4 + 4, [24, 4], [6, 1]),
    "two kv heads": (2 * 5, None, [2]),
    "single rows": (13, None, [13]),
    "as many as rows, and few": (12 + 4, [12, 4], [12, 4]),
}
cuts = pytest.mark.parametrize("cut", CUTS)


def spec_of(cut: str, dim: int = 0) -> ShardSpec:
    length, blocks, granules = CUTS[cut]
    return ShardSpec.of(dim, length, blocks, granules)


def sizes_of(spec: ShardSpec) -> list[int]:
    """The sizes up to 8 that each block has as many granules as, or that are a multiple of them."""
    return [size for size in range(1, 9) if all(count >= size or size % count == 0 for count in spec.granules)]


def by_hand(spec: ShardSpec, size: int) -> list[list[int]]:
    """The rows of each rank, dealt out granule by granule: the first ranks get the odd ones."""
    held: list[list[int]] = [[] for _ in range(size)]
    offset = 0
    for block, count in zip(spec.blocks, spec.granules, strict=True):
        unit = block // count
        pieces = [list(range(offset + unit * number, offset + unit * (number + 1))) for number in range(count)]
        if count < size:
            for rank in range(size):
                held[rank] += pieces[[number for number in range(count) for _ in range(size // count)][rank]]
        else:
            shares = [count // size + (rank < count % size) for rank in range(size)]
            for rank, share in enumerate(shares):
                for _ in range(share):
                    held[rank] += pieces.pop(0)
        offset += block
    return held


def test_heads_of_a_published_model():
    spec = ShardSpec.of(0, 38 * 64, granules=[38])
    assert [spec.extent(rank, 4) // 64 for rank in range(4)] == [10, 10, 9, 9]
    assert spec.ranges(2, 4) == [Range(20 * 64, 29 * 64, 0)]
    assert [spec.extent(rank, 2) for rank in range(2)] == [19 * 64] * 2


def test_kv_heads_of_which_ranks_share_each():
    spec = ShardSpec.of(0, 2 * 64, granules=[2])
    assert [spec.ranges(rank, 4) for rank in range(4)] == [[Range(0, 64, 0)]] * 2 + [[Range(64, 128, 0)]] * 2
    assert [spec.owned(rank, 4) for rank in range(4)] == [[Range(0, 64, 0)], [], [Range(64, 128, 0)], []]
    assert [spec.copies(size) for size in (1, 2, 4, 8)] == [1, 1, 2, 4]
    assert ShardSpec.of(0, 12 * 4, [8, 2, 2], [8, 2, 2]).copies(4) == 2


@cuts
def test_every_rank_holds_what_is_dealt_out_by_hand(cut):
    spec = spec_of(cut)
    full = torch.arange(spec.length * 2).view(spec.length, 2)
    assert len(sizes_of(spec)) >= 4
    for size in sizes_of(spec):
        held = by_hand(spec, size)
        shards = [spec.take(full, rank, size) for rank in range(size)]
        for rank, shard in enumerate(shards):
            assert torch.equal(shard, full[held[rank]])
            assert tuple(shard.shape) == spec.local_shape(full.shape, rank, size) == (spec.extent(rank, size), 2)
            assert len(shard) <= spec.longest(size)
        assert torch.equal(spec.merge(shards), full)
        owned = [row for rank in range(size) for it in spec.owned(rank, size) for row in range(it.start, it.stop)]
        assert sorted(owned) == list(range(spec.length))
        assert spec.is_even(size) == (len({len(shard) for shard in shards}) == 1)
        times = [sum(row in rows for rows in held) for row in range(spec.length)]
        assert spec.copies(size) == max(times)


@cuts
def test_a_padded_shard_is_trimmed_to_itself(cut):
    for dim in (0, -1):
        spec = spec_of(cut, dim)
        full = torch.arange(1, spec.length * 2 + 1).view((spec.length, 2) if dim == 0 else (2, spec.length))
        for size in sizes_of(spec):
            for rank in range(size):
                shard = spec.take(full, rank, size)
                padded = spec.pad(shard, size)
                assert padded.shape[dim] == spec.longest(size) and padded.count_nonzero() == shard.numel()
                assert torch.equal(spec.trim(padded, rank, size), shard)
                assert (padded is shard) == (shard.shape == padded.shape)


@pytest.mark.parametrize("dim", [0, 1, -1], ids=["rows", "columns", "the last dim"])
def test_every_row_comes_once_from_shards_of_any_cut_and_size(dim):
    # One dim of 48, whole granules of every kind; even, uneven and held by several ranks, in both directions.
    specs = [
        ShardSpec.of(dim, 48, blocks, granules)
        for blocks, granules in (
            (None, None), ([2, 1, 1], None), (None, [6]), (None, [2]), (None, [1]), (None, [48]),
            ([4, 1, 1], [8, 2, 2]), ([1, 1, 2], [6, 3, 8]), ([5, 3], [5, 6]),
        )
    ]  # fmt: skip
    full = torch.arange(96).view((48, 2) if dim == 0 else (2, 48))
    checked = 0
    for spec, stored in product(specs, specs):
        for size, stored_size in product((1, 2, 3, 4, 6), repeat=2):
            try:
                wanted = [spec.take(full, rank, size) for rank in range(size)]
                shards = [stored.take(full, rank, stored_size) for rank in range(stored_size)]
            except ValueError:
                continue
            checked += 1
            for rank, shard in enumerate(wanted):
                target, times = torch.full_like(shard, -1), torch.zeros_like(shard)
                for stored_rank, source in enumerate(shards):
                    for start, stop, at in spec.overlap(rank, size, stored, stored_rank, stored_size):
                        target.narrow(dim, at, stop - start).copy_(source.narrow(dim, start, stop - start))
                        times.narrow(dim, at, stop - start).add_(1)
                assert torch.equal(target, shard) and bool((times == 1).all()), (spec, size, stored, stored_size)
    assert checked > 1000


def test_one_granule_a_rank_is_the_even_cut():
    for size, length in ((4, 48), (3, 48), (6, 48)):
        even, granules = ShardSpec.of(0, length), ShardSpec.of(0, length, granules=[size])
        assert [even.ranges(rank, size) for rank in range(size)] == [
            granules.ranges(rank, size) for rank in range(size)
        ]


REFUSED = {
    "not made of them": (lambda: ShardSpec.of(0, 10, granules=[3]), r"\[10\] do not consist of \[3\] equal pieces"),
    "none": (lambda: ShardSpec.of(0, 10, granules=[0]), r"\[10\] do not consist of \[0\] equal pieces"),
    "of too few blocks": (lambda: ShardSpec.of(0, 12, [1, 2], [4]), r"\[4, 8\] do not consist of \[4\] equal pieces"),
    "by a spec made by hand": (
        lambda: ShardSpec(0, (10,), (3,)).ranges(0, 2),
        "a block of 10 along dim 0 is not made of 3 equal pieces",
    ),
    "shared unevenly": (
        lambda: ShardSpec.of(0, 10, granules=[2]).ranges(0, 3),
        "2 pieces that stay whole cannot be shared evenly by 3 ranks",
    ),
    "shared by fewer ranks than there are": (
        lambda: ShardSpec.of(0, 12, granules=[4]).extent(0, 6),
        "4 pieces that stay whole cannot be shared evenly by 6 ranks",
    ),
}


@pytest.mark.parametrize(("use", "message"), REFUSED.values(), ids=REFUSED)
def test_granules_that_do_not_fit_are_refused(use, message):
    with pytest.raises(ValueError, match=message):
        use()


def test_the_shard_of_another_rank_is_refused():
    spec = ShardSpec.of(0, 10, granules=[5])
    full = torch.arange(10)
    spec.put(spec.take(full, 0, 2), full.clone(), 0, 2)
    with pytest.raises(ValueError, match=r"\(6,\) is no shard of \(10,\) over 2 ranks"):
        spec.put(spec.take(full, 0, 2), full.clone(), 1, 2)
