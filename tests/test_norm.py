"""AcrossRMSNorm: a norm over channels that are split over the ranks is the norm over all of them.

On small integers the sum of squares is exact in float32, so that every rank's result has the full norm's bits in
every dtype; a sum that was taken, rounded or reduced in bfloat16 does not.
"""

import pytest
import torch
from diffusers.models.normalization import RMSNorm
from torch import nn

from close import FLOAT32, randomise, relative_error
from test_collectives import Calls
from tp_layers.group import Group
from tp_layers.kernels.rms_norm import rms_norm_reference
from tp_layers.layers.norm import AcrossRMSNorm
from tp_layers.plans.spec import ShardSpec
from tp_layers.plans.styles import style_of

SIZES = [1, 2, 3, 4]
WIDTH = 228  # four times 57, three times 76
NORMS = {
    "torch": lambda width: nn.RMSNorm(width, eps=1e-6),
    "torch_large_eps": lambda width: nn.RMSNorm(width, eps=0.5),
    "torch_eps_none": lambda width: nn.RMSNorm(width),
    "torch_without_weight": lambda width: nn.RMSNorm(width, eps=1e-6, elementwise_affine=False),
    "diffusers": lambda width: RMSNorm(width, eps=1e-6),
    "diffusers_with_bias": lambda width: RMSNorm(width, eps=1e-6, bias=True),
    "diffusers_without_weight": lambda width: RMSNorm(width, eps=1e-6, elementwise_affine=False),
}
TORCH = [name for name in NORMS if name.startswith("torch")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def norm_for(name, dtype=torch.float32, width=WIDTH):
    return randomise(NORMS[name](width)).to(dtype)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def integers(*shape, dtype=torch.float32):
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def part(x, group, last=WIDTH):
    return ShardSpec.of(-1, last).take(x, group.rank, group.size)


def run_norms(group, cases, grads=()):
    """For each (norm, x) the output, and the gradients after a backward call for each of `grads`."""
    found = []
    for norm, x in cases:
        layer = AcrossRMSNorm.from_norm(norm, group=group)
        leaf = part(x, group).requires_grad_()
        with torch.no_grad():
            plain = layer(leaf)
        for grad in grads:
            layer(leaf).backward(part(grad, group))
        found.append((plain, leaf.grad, {name: parameter.grad for name, parameter in layer.named_parameters()}))
    return found


def whole(norm, x):
    with torch.no_grad():
        return norm(x)


def check_outputs(ranks, size, cases, same):
    """Compares each rank's output with its part of the full norm's, by `same(got, wanted)`."""
    for rank, found in enumerate(ranks(size, run_norms, cases)):
        for (got, *_), (norm, x) in zip(found, cases, strict=True):
            wanted = part(whole(norm, x), Group(rank, size))
            assert got.dtype == wanted.dtype
            assert same(got, wanted), (norm, x.dtype, tuple(x.shape))


def nearly(got, wanted):
    return relative_error(got, wanted) <= FLOAT32


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", SIZES)
def test_integers_give_the_full_norm_s_bits_in_every_dtype(ranks, size, name):
    cases = [(norm_for(name, dtype), integers(64, WIDTH, dtype=dtype)) for dtype in DTYPES]
    check_outputs(ranks, size, cases, torch.equal)


@pytest.mark.parametrize("size", SIZES)
def test_a_float32_weight_shows_that_the_squares_of_bfloat16_are_reduced_in_float32(ranks, size):
    # diffusers' norm returns the weight's dtype, so that the result has the digits to show it.
    norm, x = norm_for("diffusers"), noise(64, WIDTH, dtype=torch.bfloat16)
    assert whole(norm, x).dtype == torch.float32
    check_outputs(ranks, size, [(norm, x)], nearly)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", SIZES)
def test_random_numbers_are_within_a_float32_error(ranks, size, name):
    norm = norm_for(name)
    cases = [(norm, noise(*shape, WIDTH)) for shape in ((64,), (2, 3, 5), (1,), (0,), (), (2, 1, 3, 2))]
    check_outputs(ranks, size, cases, nearly)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", [2, 3, 4])
def test_one_huge_head_is_seen_by_every_rank(ranks, size, name):
    norm, x = norm_for(name), noise(16, WIDTH)
    x[:, -WIDTH // size :] *= 100
    # Each rank by itself: the huge head would hide what is wrong with the others.
    check_outputs(ranks, size, [(norm, x)], nearly)
    for group in (Group(rank, size) for rank in range(size)):
        local = AcrossRMSNorm.from_norm(norm, group=group)
        local.group, local.spec = Group(), ShardSpec.of(0, WIDTH // size)
        error = relative_error(whole(local, part(x, group)), part(whole(norm, x), group))
        assert error > 0.25, "a norm over the local channels would pass"


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", SIZES)
def test_float16_squares_do_not_overflow(ranks, size, name):
    norm, x = norm_for(name, torch.float16), noise(4, WIDTH, dtype=torch.float16)
    x[:, 0] = 3000
    ulp = torch.finfo(torch.float16).eps
    assert whole(norm, x).isfinite().all()
    check_outputs(ranks, size, [(norm, x)], lambda got, wanted: relative_error(got, wanted) <= ulp)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", SIZES)
def test_half_precision_errs_at_most_twice_as_much_as_one_device(ranks, size, name, dtype):
    norm, x = norm_for(name, dtype), noise(64, WIDTH, dtype=dtype)
    parameters = [None if p is None else p.detach().double() for p in (norm.weight, getattr(norm, "bias", None))]
    exact = rms_norm_reference(x.double(), norm.eps or torch.finfo(torch.float32).eps, *parameters)
    one_device = relative_error(whole(norm, x), exact)
    got = torch.cat([output for ((output, *_),) in ranks(size, run_norms, [(norm, x)])], -1)
    assert relative_error(got, exact) <= 2 * one_device


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", SIZES)
def test_accumulated_gradients_are_those_of_the_full_norm(ranks, size, name):
    # diffusers' norm takes its squares in float32 whatever the dtype.
    dtype = torch.float64 if name in TORCH else torch.float32
    limit = 1e-14 if name in TORCH else FLOAT32
    norm, x = norm_for(name, dtype), noise(2, 7, WIDTH, dtype=dtype)
    x[..., -WIDTH // 4 :] *= 10
    grads = [noise(2, 7, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2)]
    found = ranks(size, run_norms, [(norm, x)], grads)
    leaf = x.clone().requires_grad_()
    for grad in grads:
        norm(leaf).backward(grad)
    for rank, ((_, x_grad, parameter_grads),) in enumerate(found):
        group = Group(rank, size)
        assert relative_error(x_grad, part(leaf.grad, group)) <= limit
        assert parameter_grads.keys() == dict(norm.named_parameters()).keys()
        for key, grad in parameter_grads.items():
            assert relative_error(grad, part(getattr(norm, key).grad, group)) <= limit


def strange_inputs(group, norm):
    """Whether the layer gives, for inputs of strange strides, what it gives for their contiguous copies."""
    layer = AcrossRMSNorm.from_norm(norm, group=group)
    x = part(noise(4, 6, WIDTH), group)
    padded = torch.stack([x, x + 1], -1).flatten(-2)
    cases = {
        "transposed": x.transpose(0, -1).contiguous().transpose(0, -1),
        "permuted": x.transpose(0, 1),
        "expanded": x[:1, :1].expand(4, 6, -1),
        "sliced_rows": x[:, 1:3],
        "every_other_column": padded[..., ::2],
        "no_rows": x[:0],
    }
    found = {}
    for name, strange in cases.items():
        leaf, plain = strange.detach().requires_grad_(), strange.contiguous().detach().requires_grad_()
        results = layer(leaf), layer(plain)
        for result in results:
            # The gradient of a sum is an expanded element.
            result.sum().backward()
        found[name] = relative_error(*results), relative_error(leaf.grad, plain.grad)
    return found


@pytest.mark.parametrize("name", ["torch", "diffusers_with_bias"])
@pytest.mark.parametrize("size", SIZES)
def test_inputs_of_any_strides(ranks, size, name):
    for found in ranks(size, strange_inputs, norm_for(name)):
        assert len(found) == 6
        for case, errors in found.items():
            assert max(errors) <= FLOAT32, case


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
    "a_namesake": (namesake(8), "not RMSNorm of test_norm"),
    "a_namesake_with_a_shape": (namesake((8,)), "not RMSNorm of test_norm"),
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
