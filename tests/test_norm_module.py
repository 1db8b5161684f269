"""AcrossRMSNorm as a module: torch's own at size one, its shard, keys and collectives, and the norms it refuses."""

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from calls import Calls
from norms import DTYPES, NORMS, TORCH, WIDTH, norm_for, part, whole
from seeded import noise
from tp_layers.group import Group
from tp_layers.layers.norm import AcrossRMSNorm
from tp_layers.plans.styles import style_of


def at_size_one(group, cases):
    found = []
    for norm, x in cases:
        layer = AcrossRMSNorm.from_norm(norm, group=group)
        leaf = x.clone().requires_grad_()
        with Calls() as calls:
            y = layer(leaf)
            y.sum().backward()
        found.append((y.detach(), whole(layer, x), calls.names))
    return found


@pytest.mark.parametrize("name", TORCH)
def test_size_one_is_torch_s_norm_bit_for_bit_without_a_collective(ranks, name):
    shapes = ((1,), (0,), (7,), (2, 9), (2, 3, 1, 5))
    cases = [
        (norm_for(name, dtype), noise(*shape, WIDTH, dtype=dtype))
        for dtype in (torch.float64, *DTYPES)
        for shape in shapes
    ]
    for found in [at_size_one(Group(), cases), *ranks(1, at_size_one, cases)]:
        for (y, plain, names), (norm, x) in zip(found, cases, strict=True):
            assert y.dtype == x.dtype and names == []
            assert torch.equal(y, whole(norm, x)) and torch.equal(plain, y), (x.dtype, tuple(x.shape))


def collectives_of(group, norm, x):
    layer = AcrossRMSNorm.from_norm(norm, group=group)
    leaf = part(x, group).requires_grad_()
    with Calls() as forward:
        y = layer(leaf)
    with Calls() as backward:
        y.sum().backward()
    return forward.names, backward.names


@pytest.mark.parametrize("size", [2, 3])
def test_one_all_reduce_forward_and_one_backward(ranks, size):
    assert ranks(size, collectives_of, norm_for("torch"), noise(3, WIDTH)) == [(["allreduce_"], ["allreduce_"])] * size


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NORMS)
def test_it_keeps_the_keys_and_holds_only_its_shard(name, dtype):
    norm = norm_for(name, dtype)
    for parameter in norm.parameters():
        parameter.requires_grad_(False)
    for rank in range(3):
        layer = style_of("rms_norm").shard(norm, Group(rank, 3))
        assert type(layer) is AcrossRMSNorm and layer.eps == norm.eps
        assert list(layer.state_dict()) == list(norm.state_dict())
        for key, value in layer.state_dict().items():
            assert value.dtype == dtype and torch.equal(value, part(norm.state_dict()[key], Group(rank, 3)))
            assert value.untyped_storage().nbytes() == norm.state_dict()[key].nbytes // 3
        assert not any(parameter.requires_grad for parameter in layer.parameters())
        assert f"{WIDTH}, eps={norm.eps}, rank {rank} of 3" in repr(layer)


class OtherRMSNorm(nn.RMSNorm):
    """A subclass with a forward of its own."""

    def forward(self, x):
        return super().forward(x) * 2


def namesake(width):
    """Another library's norm of the same name, with another formula."""

    class RMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.dim, self.eps, self.weight = width, 1e-6, nn.Parameter(torch.zeros(8))

        def forward(self, x):
            return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)

    return RMSNorm()


REFUSED = {
    "layer_norm": (nn.LayerNorm(8), "not LayerNorm"),
    "group_norm": (nn.GroupNorm(2, 8), "not GroupNorm"),
    "identity": (nn.Identity(), "not Identity"),
    "linear": (nn.Linear(8, 8), "not Linear"),
    "a_subclass": (OtherRMSNorm(8), "not OtherRMSNorm"),
    "a_namesake": (namesake(8), f"not RMSNorm of {__name__}"),
    "a_namesake_with_a_shape": (namesake((8,)), f"not RMSNorm of {__name__}"),
    "two_dims_torch": (nn.RMSNorm((4, 8)), r"one dim, this one is over \(4, 8\)"),
    "two_dims_diffusers": (RMSNorm((4, 8), eps=1e-6), r"one dim, this one is over \(4, 8\)"),
}


@pytest.mark.parametrize(("norm", "message"), REFUSED.values(), ids=REFUSED)
def test_other_modules_are_refused(norm, message):
    with pytest.raises(ValueError, match=message):
        AcrossRMSNorm.from_norm(norm, group=Group(0, 2))
    with pytest.raises(ValueError, match=message):
        style_of("rms_norm").specs(norm)


@pytest.mark.parametrize("name", NORMS)
def test_a_width_that_the_size_does_not_divide_is_refused(name):
    with pytest.raises(ValueError, match="a block of 228 along dim 0 is not divisible by 5 ranks"):
        AcrossRMSNorm.from_norm(norm_for(name), group=Group(0, 5))
