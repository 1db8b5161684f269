"""A sharded model's own process group has threads that interrupt nobody; all others stay as they were."""

import contextlib
import os
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from failure_case import Blocks, X, on_ranks, sharded
from tp_layers.group import Group
from tp_layers.launch import Ranks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="threads have such policies on Linux alone")


def policies() -> dict[int, int]:
    """Of every thread of this process."""
    found = {}
    for thread in map(int, os.listdir("/proc/self/task")):
        # It may have ended since.
        with contextlib.suppress(ProcessLookupError):
            found[thread] = os.sched_getscheduler(thread)
    return found


def linked(model: Blocks) -> bool:
    return model.blocks[0].up.group.link is not None


def threads(rank: int, own: int) -> dict[str, Any]:
    """The policies before and after, where this thread has its `own`."""
    dist.all_reduce(torch.ones(1))
    os.sched_setscheduler(0, own, os.sched_param(0))
    before = policies()
    model = sharded()
    model(X)
    after = policies()
    kept = all(after.get(thread, policy) == policy for thread, policy in before.items())
    return {"linked": linked(model), "kept": kept, "new": [after[thread] for thread in set(after) - set(before)]}


@pytest.mark.parametrize("own", ["SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE"])
def test_threads_of_the_models_own_group_interrupt_nobody(tmp_path, own):
    codes, found = on_ranks(2, tmp_path, threads, getattr(os, own))
    assert codes == [0, 0]
    # Who has chosen another policy has chosen it for what is made by it, too.
    wanted = os.SCHED_BATCH if own == "SCHED_OTHER" else getattr(os, own)
    for one in found.values():
        assert one["linked"] and one["kept"]
        # Of one for the network and one at least that runs collectives.
        assert len(one["new"]) >= 2 and set(one["new"]) == {wanted}


def forbidden(rank: int, call: str) -> dict[str, Any]:
    """A sandbox lets no thread change its policy, or ask for it."""

    def refuse(*args: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, call, refuse)
        model = sharded()
    return {"linked": linked(model), "sum": model(X).sum().item(), "policies": sorted(set(policies().values()))}


@pytest.mark.parametrize("call", ["sched_setscheduler", "sched_getscheduler"])
def test_where_that_is_forbidden_they_are_as_all_others(tmp_path, call):
    codes, found = on_ranks(2, tmp_path, forbidden, call)
    assert codes == [0, 0] and found[0] == found[1]
    assert found[0]["linked"] and found[0]["policies"] == [os.SCHED_OTHER]


def in_pool(group: Group) -> bool:
    return linked(sharded(group=group))


def test_a_pair_of_ranks_on_this_machine_has_such_a_group():
    with Ranks(2, timeout=60) as pool:
        assert pool.run(in_pool) == [True, True]
        assert pool.run(in_pool, size=1) == [False]
        assert pool.run(in_pool) == [True, True]
