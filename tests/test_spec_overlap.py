"""ShardSpec.overlap: what a rank takes from shards that were cut for another size, or in other blocks."""

import pytest
import torch

from tp_layers.plans.spec import Range, ShardSpec

SIZES = [1, 2, 3, 4, 6]
# Pairs of cuts of one dim of 144, whose blocks are all divisible by 12.
CUTS = {
    "the same": ([3, 1], [3, 1]),
    "a packed one from a plain one": ([12, 12, 12], None),
    "a plain one from a packed one": (None, [12, 12, 12]),
    "one with other edges": ([1, 11], [12, 24, 36, 72]),
    "edges the other way round": ([3, 1], [1, 3]),
}


@pytest.mark.parametrize("stored_size", SIZES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dim", [0, 1, -1], ids=["rows", "columns", "the last dim"])
@pytest.mark.parametrize(("blocks", "stored_blocks"), CUTS.values(), ids=CUTS)
def test_shards_are_put_together_from_those_of_another_cut_and_size(blocks, stored_blocks, dim, size, stored_size):
    spec, stored = ShardSpec.of(dim, 144, blocks), ShardSpec.of(dim, 144, stored_blocks)
    full = torch.arange(288).view((144, 2) if dim == 0 else (2, 144))
    shards = [stored.take(full, rank, stored_size) for rank in range(stored_size)]
    for rank in range(size):
        wanted = spec.take(full, rank, size)
        target, times = torch.full_like(wanted, -1), torch.zeros_like(wanted)
        for stored_rank, shard in enumerate(shards):
            for start, stop, at in spec.overlap(rank, size, stored, stored_rank, stored_size):
                target.narrow(dim, at, stop - start).copy_(shard.narrow(dim, start, stop - start))
                times.narrow(dim, at, stop - start).add_(1)
        assert torch.equal(target, wanted) and times.unique().tolist() == [1]


def test_overlaps_are_the_numbers_of_the_stored_shard_and_of_the_own_one():
    # Rank 1 of 2 holds rows 3, 4, 5 and 7 of the blocks of 6 and 2.
    spec, plain = ShardSpec(0, (6, 2)), ShardSpec(0, (8,))
    assert spec.overlap(1, 2, plain, 1, 4) == [Range(1, 2, 0)]
    assert spec.overlap(1, 2, plain, 3, 4) == [Range(1, 2, 3)]
    assert spec.overlap(1, 2, plain, 0, 4) == []
    assert spec.overlap(1, 2, plain, 0, 1) == [Range(3, 6, 0), Range(7, 8, 3)]
    assert spec.overlap(1, 2, spec, 1, 2) == [Range(0, 3, 0), Range(3, 4, 3)]
    assert spec.overlap(1, 2, spec, 0, 2) == []


@pytest.mark.parametrize("stored", [ShardSpec(1, (8,)), ShardSpec(0, (4,))], ids=["another dim", "another length"])
def test_shards_of_another_tensor_are_refused(stored):
    with pytest.raises(ValueError, match="was cut from another tensor, or along another dim"):
        ShardSpec.of(0, 8).overlap(0, 2, stored, 0, 2)
