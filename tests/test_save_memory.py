"""`save`: no rank holds more than a shard, but rank 0 one full parameter and one shard at a time."""

from pathlib import Path

import pytest

import tp_layers
from big import BIG_PLAN, Big
from checkpoints import identical, state_of
from close import randomise
from memory import Live
from tp_layers.group import Group


def peak_of_saving(group: Group, folder: Path, limit: str) -> int:
    model = tp_layers.apply(randomise(Big()), BIG_PLAN, group=group)
    with Live() as live:
        tp_layers.save(model, folder, max_shard_size=limit)
    return live.peak


@pytest.mark.parametrize("size", [2, 4], ids=["two ranks", "four ranks"])
@pytest.mark.parametrize("limit", ["5GB", "70KB"], ids=["one file", "several files"])
def test_rank_zero_holds_one_full_parameter_and_one_shard(ranks, tmp_path, size, limit):
    full = 64 * 256 * 4
    first, *others = ranks(size, peak_of_saving, tmp_path, limit)
    # Beside them, what the ranks tell each other: whether one has failed.
    assert full <= first <= full + full // size + 1000
    assert all(peak < full // size for peak in others)
    assert identical(state_of(tmp_path), randomise(Big()).state_dict())
