"""What cannot be part of a CUDA graph says so, and what would be wrong in one is done otherwise; a capture is faked."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor

import tp_layers
from seeded import integers
from tp_layers import RowwiseLinear, graphs
from tp_layers.collectives import all_gather, all_reduce
from tp_layers.exchange import broadcast_text, gather_objects
from tp_layers.group import Group
from tp_layers.inputs import check_first_inputs
from tp_layers.layers.overlap import Overlap
from tp_layers.plans.spec import ShardSpec
from tp_layers.under_way import all_reduce_later

GLOO = "a collective over gloo cannot be part of a CUDA graph"
OBJECTS = "what the ranks tell each other cannot be part of a CUDA graph: call it before the capture"


class Captured:
    """For the time of the block every stream is being captured, and CPU tensors pass for a GPU's."""

    def __enter__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(graphs, "captures", lambda x: True)
        self._patch.setattr(graphs, "is_captured", lambda: True)

    def __exit__(self, *error: object) -> None:
        self._patch.undo()


def on_gpu(group: Group, deterministic: bool = False) -> Group:
    """The same ranks, taken for those of GPUs."""
    return replace(group, device=torch.device("cuda", 0), deterministic=deterministic)


def said(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except RuntimeError as error:
        return str(error)
    return ""


def over_gloo(group: Group) -> list[str]:
    x, spec = integers(4, 6), ShardSpec(-1, (12,))
    layer = RowwiseLinear.from_linear(nn.Linear(12, 5), group=group)
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 6))
    calls: list[tuple[Any, ...]] = [
        (all_reduce, x.clone(), group),
        (all_reduce, x.clone(), Group.of(group, deterministic=True)),
        (all_gather, x, group, spec),
        (all_reduce_later, x.clone(), group),
        (layer, x),
    ]
    with torch.no_grad():
        before = [said(*call) for call in calls]
        layer.overlap = Overlap(2)
        with Captured():
            found = [said(*call) for call in [*calls, (layer, x)]]
            plan = {"0": "colwise", "1": "rowwise"}
            found += [said(gather_objects, 1, group), said(broadcast_text, "text", group)]
            found.append(said(lambda: tp_layers.apply(model, plan, group=group)))
    assert before == [""] * len(calls)
    return found


def test_gloo_and_objects_are_refused(ranks):
    for found in ranks(2, over_gloo):
        assert all(text.startswith(GLOO) for text in found[:6]), found
        assert found[6:] == [OBJECTS] * 3


def over_nccl(group: Group) -> list[bool]:
    """What a capture takes."""
    group, x = on_gpu(group), integers(4, 6, seed=group.rank)
    total = sum(integers(4, 6, seed=rank) for rank in range(group.size))
    outside = all_reduce_later(x.clone(), group)
    with Captured():
        inside = all_reduce_later(x.clone(), group)
        return [
            isinstance(outside, AsyncCollectiveTensor) and torch.equal(outside, total),
            type(inside) is torch.Tensor and torch.equal(inside, total),
            torch.equal(all_reduce(x.clone(), group), total),
            torch.equal(all_reduce(x.clone(), on_gpu(group, deterministic=True)), total),
        ]


def test_over_nccl_sums_are_captured_and_none_is_put_off(ranks):
    assert ranks(2, over_nccl) == [[True] * 4] * 2


def first_inputs(group: Group) -> list[int]:
    """How many checks are left, and how many collectives were made, before, in and after a capture."""
    module, x, calls = nn.Linear(3, 3), torch.ones(2, 3), []
    check_first_inputs(module, group)
    original = dist.all_reduce
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "all_reduce", lambda *args, **how: (calls.append(1), original(*args, **how))[1])
        found = []
        with Captured():
            module(x)
            found += [len(module._forward_pre_hooks), len(calls)]
        module(x)
    return [*found, len(module._forward_pre_hooks), len(calls)]


def test_the_first_inputs_are_compared_when_nothing_is_captured(ranks):
    assert ranks(2, first_inputs) == [[1, 0, 0, 1]] * 2


def test_on_a_cpu_nothing_is_captured():
    assert not graphs.is_captured() and not graphs.captures(torch.ones(1))
