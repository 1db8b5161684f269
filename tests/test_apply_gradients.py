"""A model that `apply` sharded has the output of one device and its gradients, those of norms within a head summed."""

import copy

import pytest
import torch
from torch import nn

from close import FLOAT32, relative_error
from families import FAMILIES
from small_models import ScaleNorm, small_integers
from tp_layers import Divide, apply
from tp_layers.plans.shard import sharding_of

FLUX = FAMILIES["FluxTransformer2DModel"]


class Norms(nn.Module):
    """The norms within a head in a container of their own."""

    def __init__(self):
        super().__init__()
        self.query_norm = ScaleNorm(2)

    def forward(self, x):
        return self.query_norm(x)


class Headed(nn.Module):
    def __init__(self, contained=False):
        super().__init__()
        self.heads = 4
        self.norm, self.to_q, self.norm_q, self.to_out = ScaleNorm(6), nn.Linear(6, 8), ScaleNorm(2), nn.Linear(8, 6)
        if contained:
            self.norm_q = Norms()

    def forward(self, x):
        return self.to_out(self.norm_q(self.to_q(self.norm(x)).unflatten(-1, (self.heads, 2))).flatten(-2))


def norm_of(model):
    return getattr(model[0].norm_q, "query_norm", model[0].norm_q)


def head_gradients(group, freeze, contained):
    """The gradients of both norms, sharded and whole, after two backward passes."""
    model = nn.Sequential(Headed(contained))
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = small_integers(*parameter.shape, seed=seed)
    whole = copy.deepcopy(model)
    model[0].norm_q.requires_grad_(not freeze)
    plan = {"0": Divide("heads"), "0.to_q": "colwise", "0.to_out": "rowwise"}
    apply(model, plan, group=group)
    frozen = norm_of(model).weight.requires_grad is False
    model[0].norm_q.requires_grad_(True)
    for module in (model, whole):
        for seed in (10, 11):
            module(small_integers(5, 6, seed=seed)).backward(small_integers(5, 6, seed=seed + 10))
    return frozen, [(norm_of(m).weight.grad.tolist(), m[0].norm.weight.grad.tolist()) for m in (model, whole)]


@pytest.mark.parametrize("freeze", [False, True], ids=["trained_from_the_start", "thawed_after_sharding"])
@pytest.mark.parametrize("contained", [False, True], ids=["beside", "in_a_container"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_of_a_head_norm_is_summed_and_of_no_other(ranks, size, contained, freeze):
    for frozen, (got, wanted) in ranks(size, head_gradients, freeze, contained):
        assert frozen is freeze
        assert got == wanted
        assert any(wanted[0])


class Scaled(Headed):
    """With a bare parameter that each rank applies to its own heads."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x):
        return self.to_out((self.to_q(x).unflatten(-1, (self.heads, 2)) * self.scale).flatten(-2))


def scale_gradients(group):
    """Of the whole model, the sharded one and a copy of it, after two backward passes; and the sharded names."""
    whole = nn.Sequential(Scaled())
    for seed, parameter in enumerate(whole.parameters()):
        parameter.data = small_integers(*parameter.shape, seed=seed)
    plan = {"0": Divide("heads"), "0.to_q": "colwise", "0.to_out": "rowwise"}
    plan["0.scale"] = "replicated_with_grad_allreduce"
    model = apply(copy.deepcopy(whole), plan, group=group)
    models = [whole, model, copy.deepcopy(model)]
    for module in models:
        for seed in (10, 11):
            module(small_integers(5, 6, seed=seed)).backward(small_integers(5, 6, seed=seed + 10))
    return [module[0].scale.grad.tolist() for module in models], list(sharding_of(model).resolved.specs)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_of_a_bare_parameter_is_summed_where_the_plan_says_so(ranks, size):
    for (wanted, got, copied), specs in ranks(size, scale_gradients):
        assert got == copied == wanted and any(wanted)
        assert specs == ["0.to_q.weight", "0.to_q.bias", "0.to_out.weight"]


def flux_errors(group):
    """The relative errors of the output and of this rank's gradient of every parameter, of FLUX in float64.

    Softmax ignores a shift of k, so the gradient of a k bias is a small difference: in float32 it is 2e-6 off.
    """
    model, whole = FLUX.build(dtype=torch.float64), FLUX.build(dtype=torch.float64)
    inputs = {name: value.double() for name, value in FLUX.inputs().items()}
    outputs = []
    for module in (apply(model, group=group), whole):
        output = module(**inputs, return_dict=False)[0]
        (output * torch.arange(output.numel()).view_as(output).sin()).sum().backward()
        outputs.append(output.detach())
    specs, full, errors = sharding_of(model).resolved.specs, dict(whole.named_parameters()), {}
    for name, parameter in model.named_parameters():
        wanted = full[name].grad
        if name in specs:
            wanted = specs[name].take(wanted, group.rank, group.size)
        errors[name] = relative_error(parameter.grad, wanted)
    return relative_error(*outputs), errors


@pytest.mark.parametrize("size", [1, 2, 4])
def test_flux_has_the_output_and_the_gradients_of_one_device(ranks, size):
    for output, errors in ranks(size, flux_errors):
        assert output <= FLOAT32
        assert {name: error for name, error in errors.items() if error > FLOAT32} == {}
        assert sum(".norm_q." in name or ".norm_added_k." in name for name in errors) == 4
