"""AcrossRMSNorm: a norm over channels that are split over the ranks is the norm over all of them.

On small integers the sum of squares is exact in float32, so that every rank's result has the full norm's bits in
every dtype; a sum that was taken, rounded or reduced in bfloat16 does not.
"""

import pytest
import torch

from close import FLOAT32, nearly, relative_error
from norms import DTYPES, NORMS, SIZES, TORCH, WIDTH, norm_for, part, whole
from seeded import integers, noise
from tp_layers.group import Group
from tp_layers.kernels.rms_norm import rms_norm_reference
from tp_layers.layers.norm import AcrossRMSNorm
from tp_layers.plans.spec import ShardSpec


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


def check_outputs(ranks, size, cases, same):
    """Compares each rank's output with its part of the full norm's, by `same(got, wanted)`."""
    for rank, found in enumerate(ranks(size, run_norms, cases)):
        for (got, *_), (norm, x) in zip(found, cases, strict=True):
            wanted = part(whole(norm, x), Group(rank, size))
            assert got.dtype == wanted.dtype
            assert same(got, wanted), (norm, x.dtype, tuple(x.shape))


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


def test_an_input_of_another_width_is_refused():
    layer = AcrossRMSNorm.from_norm(torch.nn.RMSNorm(WIDTH, elementwise_affine=False), group=Group(0, 2))
    with pytest.raises(ValueError, match=f"this norm takes {WIDTH // 2} of {WIDTH} channels, its input has {WIDTH}"):
        layer(noise(3, WIDTH))
