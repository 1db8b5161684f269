"""ShardSpec refuses blocks, sizes and tensors that do not fit, with the numbers."""

import pytest
import torch

from tp_layers.plans.spec import ShardSpec

WRONG_BLOCKS = {
    "none_at_all": (12, [], "positive integers"),
    "zero": (12, [1, 0], "positive integers"),
    "negative": (12, [-1, 2], "positive integers"),
    "fraction": (12, [0.5, 0.5], "positive integers"),
    "whole_float": (12, [2.0, 1.0], "positive integers"),
    "truth_value": (12, [True, True], "positive integers"),
    "text": (12, ["1", "1"], "positive integers"),
    "sum_does_not_divide": (13, [3, 1], r"\[3, 1\] add up to 4, which does not divide 13"),
    "sum_too_large": (4, [3, 3], r"\[3, 3\] add up to 6, which does not divide 4"),
    "no_length": (0, None, "does not divide 0"),
}


@pytest.mark.parametrize(("length", "blocks", "message"), WRONG_BLOCKS.values(), ids=WRONG_BLOCKS)
def test_wrong_blocks_are_refused(length, blocks, message):
    with pytest.raises(ValueError, match=message):
        ShardSpec.of(0, length, blocks)


def test_a_block_that_the_size_does_not_divide_is_refused():
    # The whole dim, 12, is divisible by 2 and by 4; the blocks of 9 and 3 are not.
    spec, full = ShardSpec.of(0, 12, [3, 1]), torch.zeros(12)
    for use in (
        spec.ranges,
        lambda rank, size: spec.take(full, rank, size),
        lambda rank, size: spec.view(full, rank, size),
    ):
        for rank in (0, 1):
            with pytest.raises(ValueError, match="a block of 9 along dim 0 is not divisible by 2 ranks"):
                use(rank, 2)
    with pytest.raises(ValueError, match="not divisible by 4 ranks"):
        spec.local_shape((12,), 0, 4)
    with pytest.raises(ValueError, match="a block of 3 along dim 0 is not divisible by 2 ranks"):
        ShardSpec(0, (4, 3)).ranges(0, 2)


@pytest.mark.parametrize("length", [4, 12])
def test_a_tensor_of_another_length_is_refused(length):
    spec = ShardSpec.of(0, 8)
    with pytest.raises(ValueError, match=f"dim 0 has {length} entries, the spec was made for 8"):
        spec.take(torch.zeros(length, 2), 0, 2)


@pytest.mark.parametrize("shape", [(1, 4), (3, 1), (3, 3), (3,)], ids=["one_row", "one_column", "narrow", "flat"])
def test_a_shard_of_another_shape_is_refused_and_not_broadcast(shape):
    full = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="is no shard of"):
        ShardSpec.of(1, 8).put(torch.ones(shape), full, 0, 2)
    assert not full.any()
