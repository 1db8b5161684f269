"""The last steps of sharding, of which ranks may not take some and others not."""

import pytest

import tp_layers
from families import FAMILIES
from tp_layers.group import Group
from tp_layers.plans import finish, streams

FLUX2 = FAMILIES["Flux2Transformer2DModel"]


def sharded(group: Group, folder: str | None) -> str:
    """What is said where a model is sharded, in memory or from a folder; "" for nothing."""
    try:
        if folder is None:
            tp_layers.apply(FLUX2.build(), group=group)
        else:
            tp_layers.load(FLUX2.cls, folder, group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def one_fails(group: Group, folder: str | None) -> list[str]:
    def fail(*args: object) -> list[str]:
        raise MemoryError("no room for a fused weight")

    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setattr(finish, "fuse_model", fail)
        said = sharded(group, folder)
    return [said, sharded(group, folder)]


def one_has_other_sources(group: Group, folder: str | None) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        if group.rank == 1:
            patch.setattr(streams, "BLOCK", "of another version of diffusers")
        said = sharded(group, folder)
    return [said, sharded(group, folder)]


@pytest.fixture(params=["in memory", "loaded"])
def folder(request, tmp_path):
    if request.param == "loaded":
        FLUX2.build().save_pretrained(tmp_path)
    return str(tmp_path) if request.param == "loaded" else None


def test_where_one_rank_cannot_finish_none_waits_for_it(ranks, folder):
    (other, other_after), (own, own_after) = ranks(2, one_fails, folder)
    assert other == "OtherRankError: rank 1 of 2 failed: MemoryError: no room for a fused weight"
    assert own == "MemoryError: no room for a fused weight"
    assert other_after == own_after == ""


def test_ranks_that_would_sum_other_streams_together_are_refused(ranks, folder):
    for said, after in ranks(2, one_has_other_sources, folder):
        assert said.startswith("ValueError: rank ") and "other versions of its libraries" in said
        assert after == ""
