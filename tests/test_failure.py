"""A rank that raises within a forward ends it on every rank, in seconds, and is named by all of them."""

import datetime
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tp_layers
from close import randomise
from failure_case import HOWS, SECONDS, Blocks, X, boom, on_ranks, sharded, told
from toy import PLAN as TOY_PLAN
from toy import Toy, save_toy
from tp_layers.exchange import largest


def raises(rank: int, how: str) -> dict[str, Any]:
    """Rank 1 raises in its second forward; then the caller's group and the model are used again."""
    model = sharded(**HOWS[how])
    first = model(X)
    if rank == 1:
        model.fail = boom
    found = told(model)
    total = torch.ones(1000)
    dist.all_reduce(total)
    model.fail = lambda: None
    refused = told(model)
    part = told(model.blocks[0])
    again = sharded(**HOWS[how])
    same = torch.equal(again(X), first) and torch.equal(model(X), first)
    return {**found, "refused": refused, "part": part["told"], "total": total.unique().tolist(), "same": same}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("size", [2, 3])
def test_a_raised_error_is_raised_on_every_rank(tmp_path, size, how):
    codes, found = on_ranks(size, tmp_path, raises, how)
    assert codes == [0] * size
    for rank, one in found.items():
        why = f"rank 1 of {size} failed: ValueError: boom"
        assert one["kind"] == ("ValueError" if rank == 1 else "RuntimeError") and why in one["told"]
        assert one["told"].startswith("boom" if rank == 1 else why)
        assert one["refused"]["told"] == one["part"]
        assert one["part"] == f"this model cannot run, as {why}; shard or load it again, on every rank"
        assert one["seconds"] < SECONDS and one["refused"]["seconds"] < 1
        assert one["total"] == [size] and one["same"]


def alike(rank: int) -> dict[str, Any]:
    """Every rank raises, twice, and then none does."""
    model = sharded()
    first = model(X)
    model.fail = boom
    found = [told(model)["told"] for _ in range(2)]
    model.fail = lambda: None
    own: Any = model.blocks[0].up.group.link
    return {"told": found, "same": torch.equal(model(X), first), "generation": own.generation}


def test_where_all_ranks_raise_they_can_go_on(tmp_path):
    codes, found = on_ranks(3, tmp_path, alike)
    assert codes == [0] * 3
    for one in found.values():
        assert all(text.startswith("boom") for text in one["told"]) and one["same"] and one["generation"] == 3


def apart(rank: int) -> dict[str, Any]:
    """Rank 0 raises in its first forward, after the last sum, and rank 1 in its second, before the first one."""
    model = sharded()
    model.at = 2
    if rank == 0:
        model.fail = boom
        found = told(model)
        model.fail = lambda: None
    else:
        model(X)
        hook = model.blocks[0].register_forward_pre_hook(lambda *args: boom())
        found = told(model)
        hook.remove()
    return {**found, "refused": told(model)["told"]}


def test_ranks_that_raise_in_unlike_forwards_cannot_go_on(tmp_path):
    codes, found = on_ranks(2, tmp_path, apart)
    assert codes == [0, 0]
    assert all("this model cannot run" in one["refused"] for one in found.values())


def compiled(rank: int) -> dict[str, Any]:
    """Blocks are compiled; rank 1 raises between them, and the model is used again."""
    model = sharded()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    first = model(X)
    # The other one waits outside of compiled code, within which nobody looks.
    model.fail = boom if rank == 1 else lambda: largest(X, model.blocks[0].up.group)
    found = told(model)
    model.fail = lambda: None
    sharded()
    return {**found, "same": torch.equal(model(X), first)}


def loaded(rank: int, folder: Path) -> dict[str, Any]:
    """A model from a checkpoint, which rank 1 fails in; it can be saved and reloaded, and runs after a load."""
    model, x = tp_layers.load(Toy, folder, plan=TOY_PLAN), torch.ones(2, 6)
    first = model(x)
    hook = model.down.register_forward_pre_hook(lambda *args: boom() if rank == 1 else None)
    found = told(model, x)
    hook.remove()
    tp_layers.save(model, folder / "saved")
    tp_layers.reload(model, folder / "saved")
    again = tp_layers.load(Toy, folder / "saved", plan=TOY_PLAN)
    return {**found, "same": torch.equal(again(x), first) and torch.equal(model(x), first)}


def test_a_loaded_model_too_which_can_be_saved_after_a_failure(tmp_path):
    folder = tmp_path / "toy"
    folder.mkdir()
    save_toy(folder)
    codes, found = on_ranks(2, tmp_path, loaded, folder)
    assert codes == [0, 0]
    for one in found.values():
        assert "rank 1 of 2 failed: ValueError: boom" in one["told"] and one["same"]


@pytest.mark.slow
def test_compiled_blocks_take_the_new_link(tmp_path):
    codes, found = on_ranks(2, tmp_path, compiled)
    assert codes == [0, 0]
    for one in found.values():
        assert "rank 1 of 2 failed: ValueError: boom" in one["told"] and one["same"]


def unheard(rank: int) -> dict[str, Any]:
    """Rank 1 raises after the last sum, when the others need nothing more of it; then all shard another model."""
    model = sharded()
    first = model(X)
    model.at = 2
    if rank == 1:
        model.fail = boom
        told(model)
    else:
        model(X)
    again = sharded()
    own: Any = again.blocks[0].up.group.link
    return {"same": torch.equal(again(X), first), "generation": own.generation}


def test_a_failure_that_a_rank_has_not_heard_of_ends_its_link_too(tmp_path):
    codes, found = on_ranks(2, tmp_path, unheard)
    assert codes == [0, 0]
    assert all(one == {"same": True, "generation": 2} for one in found.values())


def late(rank: int) -> dict[str, Any]:
    """Rank 1 is slower than the timeout of the group allows."""
    model = sharded(group=dist.new_group([0, 1], datetime.timedelta(seconds=2)))
    model(X)
    if rank == 1:
        model.fail = lambda: time.sleep(6)
    return told(model)


def test_the_timeout_of_the_group_ends_a_wait(tmp_path):
    codes, found = on_ranks(2, tmp_path, late)
    assert codes == [0, 0]
    assert found[0]["told"] == "rank 1 of 2 died, or does not answer" and 2 < found[0]["seconds"] < 6


class Untouched:
    """A store that may not be used."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"store.{name}")


def healthy(rank: int) -> dict[str, Any]:
    """A forward within the handler of an error, without a store; then one in which a rank is slow."""
    model = sharded()
    first = model(X)
    own: Any = model.blocks[0].up.group.link
    store, own._store = own._store, Untouched()
    try:
        raise KeyError("of the caller's own")
    except KeyError:
        same = torch.equal(model(X), first)
    own._store = store
    if rank == 1:
        model.fail = lambda: time.sleep(3)
    return {"same": same and torch.equal(model(X), first), "generation": own.generation, "cause": own.cause}


def test_a_healthy_forward_does_not_use_the_store_and_a_slow_rank_is_no_failure(tmp_path):
    codes, found = on_ranks(3, tmp_path, healthy)
    assert codes == [0] * 3
    assert all(one == {"same": True, "generation": 1, "cause": ""} for one in found.values())


def shapes(rank: int) -> dict[str, Any]:
    """Rank 1 is given more rows, and then as many as the others."""
    model = sharded()
    found = told(model, torch.ones(5 + rank % 2, 12))
    return {**found, "after": model(X).unique().tolist()}


@pytest.mark.parametrize("size", [2, 3])
def test_inputs_of_other_shapes_are_refused_by_every_rank_which_can_go_on(tmp_path, size):
    codes, found = on_ranks(size, tmp_path, shapes)
    assert codes == [0] * size
    for one in found.values():
        assert one["told"].startswith(f"rank 1 of {size} was given another 'x' than rank 0")
        assert one["seconds"] < SECONDS and one["after"] == found[0]["after"]


def unlike(rank: int) -> dict[str, Any]:
    """Rank 0 knows a process group more than the others."""
    dist.new_group([0])
    plain, model = randomise(Blocks()), sharded()
    return {"link": model.blocks[0].up.group.link is not None, "far": float((model(X) - plain(X)).abs().max())}


def test_ranks_that_know_unlike_process_groups_get_no_link(tmp_path):
    codes, found = on_ranks(2, tmp_path, unlike)
    assert codes == [0, 0]
    assert all(not one["link"] and one["far"] < 1e-5 for one in found.values())
