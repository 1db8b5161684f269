"""`apply` has one parameter in flight, and leaves the bytes of a rank's part."""

import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from stack import STACK, Stack
from tp_layers import apply


class Live(TorchDispatchMode):
    """The bytes of the tensors of `model`, and of whatever operations within the context allocate, while it lives."""

    def __init__(self, model):
        super().__init__()
        self.sizes = {}
        self.note([*model.parameters(), *model.buffers()])
        self.start = self.peak = self.bytes

    @property
    def bytes(self):
        return sum(self.sizes.values())

    def note(self, tensors):
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self.sizes:
                self.sizes[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.sizes.pop, storage._cdata)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.note(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        self.peak = max(self.peak, self.bytes)
        return result


def live_bytes(group):
    """Start, peak and end of the live bytes, the largest parameter, and the bytes the sharded model should hold."""
    model = Stack()
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    largest = max(parameter.nbytes for parameter in model.parameters())
    planned = {name for name, _ in model.named_parameters() if name.split(".")[-2] != "whole"}
    planned -= {name for name in planned if name.endswith("down.bias")}
    wanted = sum(p.nbytes // (group.size if name in planned else 1) for name, p in model.named_parameters())
    wanted += sum(buffer.nbytes for buffer in model.buffers())
    gc.disable()
    try:
        with Live(model) as live:
            apply(model, STACK, group=group)
        # The process group's own thread may hold what it reduced for a moment longer.
        deadline = time.monotonic() + 10
        while live.bytes > wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return live.start, live.peak, live.bytes, largest, wanted
    finally:
        gc.enable()


@pytest.mark.parametrize("size", [2, 4])
def test_no_more_than_one_parameter_is_in_flight(ranks, size):
    for start, peak, end, largest, wanted in ranks(size, live_bytes):
        assert start < peak <= start + largest
        assert end == wanted


def test_live_counts_what_is_allocated_and_freed():
    model = nn.Linear(4, 4, bias=False)
    with Live(model) as live:
        assert live.bytes == 64
        more = model.weight * 2
        view = more[1:]
        assert (live.bytes, live.peak) == (128, 128)
        del more
        assert live.bytes == 128
        del view
        assert live.bytes == 64
        _ = model.weight + 1 + 1
    assert live.peak == 192
