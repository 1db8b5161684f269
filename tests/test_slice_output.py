"""SliceOutput: a rank's part of every tensor that a module returns, along any dim, and what it refuses."""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import nn

from tp_layers import SliceOutput
from tp_layers.group import Group


class Returns(nn.Module):
    def __init__(self, value):
        super().__init__()
        self.value = value

    def forward(self, x):
        return self.value


def table(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


T, LAST = table(3, 8), [4, 5, 6, 7]
OUTPUTS = {
    "a_tensor": (T, T[:, LAST]),
    "a_tuple": ((T, T + 1), (T[:, LAST], T[:, LAST] + 1)),
    "a_list": ([T, T + 1], [T[:, LAST], T[:, LAST] + 1]),
    "nested": ((T, [T + 1, (T + 2,)]), (T[:, LAST], [T[:, LAST] + 1, (T[:, LAST] + 2,)])),
    "what_is_no_tensor": ((T, None, 3, "name"), (T[:, LAST], None, 3, "name")),
}


def same(a, b):
    if isinstance(a, tuple | list):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


@pytest.mark.parametrize(("value", "wanted"), OUTPUTS.values(), ids=OUTPUTS)
def test_slice_output_slices_the_tensors_of_any_nesting(value, wanted):
    module = Returns(value)
    assert SliceOutput(-1).shard(module, Group(1, 2)) is module
    assert same(module(T), wanted)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(copied(T), wanted)


class Named(NamedTuple):
    cos: torch.Tensor


@pytest.mark.parametrize("value", [{"cos": T}, Named(T), (T, {"sin": T})], ids=["a_dict", "a_named_tuple", "within"])
def test_slice_output_refuses_what_it_would_leave_whole(value):
    module = SliceOutput(-1).shard(Returns(value), Group(1, 2))
    with pytest.raises(TypeError, match=r"slices tensors, plain tuples and lists; Returns returns a (dict|Named)"):
        module(T)


@pytest.mark.parametrize("dim", [0, 1, -2, -3])
def test_slice_output_along_any_dim(dim):
    value = table(4, 8, 2)
    module = SliceOutput(dim).shard(Returns(value), Group(1, 2))
    assert torch.equal(module(value), value.chunk(2, dim)[1])


def test_slice_output_of_a_table_that_does_not_divide_is_an_error_of_forward():
    module = SliceOutput(0).shard(Returns(T), Group(1, 2))
    with pytest.raises(ValueError, match="a block of 3 along dim 0 is not divisible by 2 ranks"):
        module(T)
