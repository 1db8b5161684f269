"""`describe` where ranks hold unequal parts: the largest rank's bytes, the same from every rank."""

import pytest
import torch
from torch import nn

import tp_layers
from families import FAMILIES
from tp_layers.group import Group

PLAN = {"up": "colwise", "down": "rowwise"}


def on_meta():
    with torch.device("meta"):
        return FAMILIES["QwenImageTransformer2DModel"].make(6)


def pair():
    return {"up": nn.Linear(8, 14), "down": nn.Linear(14, 8)}


def test_describe_reports_the_largest_rank():
    model = on_meta()
    report = tp_layers.describe(model, size=4, uneven=True)
    held = []
    for rank in range(4):
        sharded = tp_layers.apply(on_meta(), group=Group(rank, 4), uneven=True)
        held.append(sum(tensor.numel() * tensor.dtype.itemsize for tensor in sharded.state_dict().values()))
        assert tp_layers.describe(sharded) == report
    assert report.held_bytes == held[0] == max(held) > min(held)
    assert not report.is_even and "  largest rank     " in str(report) and "each rank holds" not in str(report)
    assert tp_layers.describe(model, size=3, uneven=True).is_even


def test_a_sharded_model_keeps_whether_it_is_uneven():
    sharded = tp_layers.apply(nn.ModuleDict(pair()), PLAN, group=Group(0, 3), uneven=True)
    assert tp_layers.describe(sharded, uneven=True) == tp_layers.describe(sharded)
    even = tp_layers.apply(nn.ModuleDict(pair()), PLAN, group=Group(0, 2))
    with pytest.raises(ValueError, match=r"sharded over 2 ranks already: describe\(model\) says how"):
        tp_layers.describe(even, uneven=True)
