"""ShardSpec: which elements a rank holds, written out by hand, and that taking and merging undo each other."""

import pytest
import torch

from tp_layers.plans.spec import Range, ShardSpec

SIZES = [1, 2, 3, 4]
# Every block is divisible by 1, 2, 3 and 4. Proportions, as a plan gives them.
BLOCKS = {
    "one_block": None,
    "three_to_one": [3, 1],
    "qkv": [12, 12, 12],
    "grouped_qkv_and_gated_mlp": [24, 12, 12, 36, 36],
    "one_to_eleven": [1, 11],
}
SHAPES = {
    "vector": (None,),
    "rows": (None, 5),
    "columns": (7, None),
    "middle": (3, None, 2),
    "last_of_three": (2, 3, None),
}
DTYPES = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


def case(blocks, shape, negative=False):
    """The spec, and the full shape, of a tensor cut along the dim that `shape` leaves open."""
    length = 12 * sum(blocks or [1])
    dim = shape.index(None)
    full = tuple(length if extent is None else extent for extent in shape)
    return ShardSpec.of(dim - len(shape) if negative else dim, length, blocks), full


def random_bits(shape, dtype=torch.float32):
    """Any bit pattern of the dtype, NaNs with payloads and negative zeros among them."""
    integer = DTYPES[dtype]
    low, high = torch.iinfo(integer).min, torch.iinfo(integer).max
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7), dtype=integer).view(dtype)


def same_bits(a, b):
    return a.dtype == b.dtype and torch.equal(
        a.contiguous().view(DTYPES[a.dtype]), b.contiguous().view(DTYPES[b.dtype])
    )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_merge_undoes_take_bit_for_bit(blocks, shape, size):
    spec, full_shape = case(blocks, shape)
    for dtype in DTYPES:
        full = random_bits(full_shape, dtype)
        shards = [spec.take(full, rank, size) for rank in range(size)]
        shapes = [spec.local_shape(full_shape, rank, size) for rank in range(size)]
        assert [tuple(shard.shape) for shard in shards] == shapes and len(set(shapes)) == 1
        assert same_bits(spec.merge(shards), full)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_take_undoes_merge_bit_for_bit(blocks, shape, size):
    spec, full_shape = case(blocks, shape)
    shards = list(random_bits((size, *spec.local_shape(full_shape, 0, size))))
    full = spec.merge(shards)
    assert full.shape == full_shape
    assert all(same_bits(spec.take(full, rank, size), shard) for rank, shard in enumerate(shards))


# Length, proportions, and the entries that each rank holds.
HELD = {
    "one_block": (8, [1], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "three_to_one": (12, [3, 1], [[0, 1, 2, 9], [3, 4, 5, 10], [6, 7, 8, 11]]),
    "qkv_and_gated_mlp": (14, [1, 1, 1, 2, 2], [[0, 2, 4, 6, 7, 10, 11], [1, 3, 5, 8, 9, 12, 13]]),
    "qkv_on_one_rank": (6, [1, 1, 1], [[0, 1, 2, 3, 4, 5]]),
    "gate_and_up": (16, [1, 1], [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]),
}


@pytest.mark.parametrize("dim", [0, 1, -1, -2])
@pytest.mark.parametrize(("length", "blocks", "held"), HELD.values(), ids=HELD)
def test_a_rank_holds_its_part_of_every_block(length, blocks, held, dim):
    spec = ShardSpec.of(dim, length, blocks)
    other = 3
    full = torch.arange(length * other).reshape((length, other) if dim in (0, -2) else (other, length))
    for rank, entries in enumerate(held):
        wanted = full[entries] if dim in (0, -2) else full[:, entries]
        assert torch.equal(spec.take(full, rank, len(held)), wanted)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_shards_hold_every_block_chunked(blocks, size):
    spec, (length, width) = case(blocks, (None, 3))
    full = torch.arange(length * width).view(length, width)
    parts = [block.chunk(size) for block in full.split([12 * part for part in blocks or [1]])]
    for rank in range(size):
        assert torch.equal(spec.take(full, rank, size), torch.cat([part[rank] for part in parts]))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_ranges_cover_full_and_shard_once(blocks, size):
    spec, (length,) = case(blocks, (None,))
    covered = []
    for rank in range(size):
        ranges = spec.ranges(rank, size)
        covered += [row for start, stop, _ in ranges for row in range(start, stop)]
        held = [at + row for start, stop, at in ranges for row in range(stop - start)]
        assert held == list(range(length // size))
    assert sorted(covered) == list(range(length))


def test_ranges_are_the_numbers_of_the_rank():
    assert ShardSpec(0, (9, 3)).ranges(1, 3) == [Range(3, 6, 0), Range(10, 11, 3)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_negative_dim_counts_from_the_end(shape, size):
    (spec, full_shape), (negative, _) = case([3, 1], shape), case([3, 1], shape, negative=True)
    full = random_bits(full_shape)
    assert negative.dim < 0 <= spec.dim
    assert negative.local_shape(full_shape, 0, size) == spec.local_shape(full_shape, 0, size)
    shards = [spec.take(full, rank, size) for rank in range(size)]
    for rank, shard in enumerate(shards):
        assert same_bits(negative.take(full, rank, size), shard)
        assert same_bits(negative.view(full, rank, size), shard)
    assert same_bits(negative.merge(shards), full)


def test_blocks_are_proportions_or_sizes():
    sizes = ShardSpec.of(0, 48, [36, 12])
    assert sizes.blocks == (36, 12) and sizes.length == 48
    assert ShardSpec.of(0, 48, [3, 1]) == ShardSpec.of(0, 48, (6, 2)) == sizes
    assert hash(ShardSpec.of(0, 48, [3, 1])) == hash(sizes)
    assert ShardSpec.of(0, 48) == ShardSpec.of(0, 48, [1]) == ShardSpec(0, (48,))
    assert ShardSpec.of(0, 48, [1, 3]) != sizes != ShardSpec.of(1, 48, [36, 12])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize("transposed", [False, True], ids=["contiguous_full", "transposed_full"])
def test_take_owns_contiguous_storage(blocks, size, transposed):
    spec, shape = case(blocks, (None, 5))
    full = random_bits(shape[::-1]).t() if transposed else random_bits(shape)
    for rank in range(size):
        shard = spec.take(full, rank, size)
        assert shard.is_contiguous()
        assert shard.untyped_storage().data_ptr() != full.untyped_storage().data_ptr()
        assert shard.untyped_storage().nbytes() == shard.numel() * shard.element_size()
    before = shard.clone()
    full.zero_()
    assert same_bits(shard, before)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_view_equals_take_and_copies_only_several_blocks(blocks, size):
    spec, shape = case(blocks, (3, None))
    full = random_bits(shape)
    for rank in range(size):
        view = spec.view(full, rank, size)
        assert same_bits(view, spec.take(full, rank, size))
        shares = view.untyped_storage().data_ptr() == full.untyped_storage().data_ptr()
        assert shares == (len(spec.blocks) == 1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_put_writes_the_rank_s_part_and_nothing_else(blocks, size):
    spec, (length, width) = case(blocks, (None, 3))
    numbers = torch.arange(length * width).view(length, width)
    for rank in range(size):
        full = torch.full((length, width), -1)
        spec.put(spec.take(numbers, rank, size), full, rank, size)
        rows = [row for start, stop, _ in spec.ranges(rank, size) for row in range(start, stop)]
        wanted = torch.full((length, width), -1)
        wanted[rows] = numbers[rows]
        assert torch.equal(full, wanted)


def test_a_meta_tensor_has_meta_shards():
    spec = ShardSpec.of(0, 48, [3, 1])
    shard = spec.take(torch.empty(48, 5, device="meta"), 1, 4)
    assert shard.is_meta and shard.shape == (12, 5)
