"""Blocks that are wrong and sizes that do not divide are an error with the key or parameter and the numbers."""

import pytest
from diffusers.hooks.tensor_parallel import PackedColwiseParallel as DiffusersPackedColwise

from refused import refused
from toy_plans import PAIR, Toy, check_refused, check_refused_on_meta, packed, plus, row_packed
from tp_layers import Divide, ShardParameter
from tp_layers.plans.resolve import resolve

WRONG = {
    "blocks_that_do_not_divide_the_rows": (
        packed([1, 1, 1]),
        2,
        ["'blocks.*.up' at 'blocks.0.up'", "the blocks [1, 1, 1] add up to 3, which does not divide 8"],
    ),
    "blocks_that_do_not_divide_the_columns": (
        row_packed([1, 2]),
        2,
        ["'blocks.*.down' at 'blocks.0.down'", "the blocks [1, 2] add up to 3, which does not divide 8"],
    ),
    "blocks_larger_than_the_rows": (packed([8, 8]), 2, ["add up to 16, which does not divide 8"]),
    "a_dim_of_one_block": (
        PAIR,
        3,
        [
            "'blocks.0.up.weight' (dim 0): a block of 8 is not divisible by 3",
            "sizes that work for this plan: 1, 2, 4, 8",
        ],
    ),
    "a_block_though_their_sum_divides": (
        packed([3, 1]),
        4,
        [
            "'blocks.0.up.weight' (dim 0 in blocks [6, 2]): a block of 6 is not divisible by 4 ranks",
            "sizes that work for this plan: 1, 2",
        ],
    ),
    "the_last_block_though_the_first_divides": (
        packed([2, 1, 1]),
        4,
        ["'blocks.0.up.weight' (dim 0 in blocks [4, 2, 2]): a block of 2 is not divisible by 4 ranks"],
    ),
    "a_block_of_columns": (
        row_packed([6, 2]),
        4,
        ["'blocks.0.down.weight' (dim 1 in blocks [6, 2]): a block of 6 is not divisible by 4 ranks"],
    ),
    "no_blocks_for_the_rows": (packed(None), 2, ["PackedColwiseParallel has no blocks", "`_tp_packed_col_blocks`"]),
    "no_blocks_for_the_columns": (
        row_packed(None),
        2,
        ["PackedRowwiseParallel has no blocks", "`_tp_packed_row_blocks`"],
    ),
    "an_empty_list_of_blocks": (packed([]), 2, ["PackedColwiseParallel has no blocks"]),
    "a_marker_of_diffusers_without_blocks": (
        packed(None) | {"blocks.*.up": DiffusersPackedColwise()},
        2,
        ["no blocks"],
    ),
    "a_block_of_zero": (packed([0, 1]), 2, ["'blocks.0.up': blocks must be positive integers, got [0, 1]"]),
    "a_negative_block": (packed([-1, 3]), 2, ["blocks must be positive integers, got [-1, 3]"]),
    "a_block_that_is_a_bool": (packed([True, True]), 2, ["blocks must be positive integers, got [True, True]"]),
    "a_block_that_is_no_integer": (packed([0.5, 1.5]), 2, ["blocks must be positive integers, got [0.5, 1.5]"]),
    "a_bad_block_from_a_function": (
        packed(lambda linear: [linear.out_features, 0]),
        2,
        ["blocks must be positive integers, got [8, 0]"],
    ),
    "rms_norm_width": (
        {"blocks.*.rms": "rms_norm"},
        3,
        ["'blocks.0.rms.weight' (dim 0): a block of 8 is not divisible by 3", "1, 2, 4, 8"],
    ),
    "a_parameter_that_does_not_divide": (
        plus("blocks.*.table", ShardParameter(0)),
        2,
        ["'blocks.0.table' (dim 0): a block of 3 is not divisible by 2 ranks", "sizes that work for this plan: 1"],
    ),
    "an_attribute_that_does_not_divide": (
        {"blocks.*": Divide("groups"), "blocks.*.down": "rowwise"},
        4,
        ["'blocks.0': groups of 6 is not divisible by 4 ranks", "sizes that work for this plan: 1, 2"],
    ),
    "size_zero": (PAIR, 0, ["the size must be at least 1, got 0"]),
    "a_negative_size": (PAIR, -1, ["the size must be at least 1, got -1"]),
}


@pytest.mark.parametrize(("plan", "size", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_plan_is_refused(plan, size, message):
    check_refused(plan, size, message)


@pytest.mark.parametrize(("plan", "size", "message"), WRONG.values(), ids=WRONG)
def test_a_meta_model_is_refused_alike(plan, size, message):
    check_refused_on_meta(plan, size, message)


def test_divide_without_attributes_and_blocks_left_on_the_wrong_side():
    with pytest.raises(ValueError, match="Divide needs the names of attributes"):
        Divide()
    model = Toy()
    for block in model.blocks:
        block.up._tp_packed_row_blocks = [1, 1]
    with refused(model, "PackedColwiseParallel has no blocks"):
        resolve(model, packed(None), 2)
