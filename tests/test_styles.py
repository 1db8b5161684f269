"""What each style does to a model: on 1, 2 and 4 ranks the outputs and every gradient of the unsharded one.

The models compute in small integers, so that sums are exact in any order; only norms are compared within rounding. What
a rank holds is compared with a cut written out by hand.
"""

import copy

import pytest
import torch
from diffusers.hooks import tensor_parallel
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import nn

from close import FLOAT32, randomise, relative_error
from small_models import PAIR, PAIR_CUTS, Alone, Attention, Fused, Pair, Rotary, Scaled, cut, small_integers
from tp_layers import Divide, PackedColwiseParallel, PackedRowwiseParallel, ShardParameter, SliceOutput, apply
from tp_layers.group import Group
from tp_layers.plans.styles import STYLES, style_of

SIZES = [1, 2, 4]
FUSED_CUTS = {"fused.weight": (0, [8, 8, 8, 16]), "fused.bias": (0, [8, 8, 8, 16]), "out.weight": (1, [8, 16])}
ATTENTION = {
    "": Divide("heads", "kv_heads"), "to_q": "colwise", "to_k": "colwise", "to_v": "colwise", "to_out": "rowwise"
}  # fmt: skip
ATTENTION_CUTS = {
    f"{name}.{part}": (0, [rows])
    for name, rows in (("to_q", 16), ("to_k", 8), ("to_v", 8))
    for part in ("weight", "bias")
}


def fused(columns, rows):
    return {"fused": columns, "out": rows}


def diffusers_fused(columns, rows):
    return fused(tensor_parallel.PackedColwiseParallel(columns), tensor_parallel.PackedRowwiseParallel(rows))


# The model, the plan, and for every parameter that is cut its dim and its blocks. Built on the ranks.
CASES = {
    "colwise_and_rowwise": lambda: (Pair(), PAIR, PAIR_CUTS),
    "colwise_gather": lambda: (
        Alone(), {"linear": "colwise_gather"}, {"linear.weight": (0, [12]), "linear.bias": (0, [12])}
    ),
    "rowwise_split_input": lambda: (Alone(), {"linear": "rowwise_split_input"}, {"linear.weight": (1, [8])}),
    "blocks_as_proportions": lambda: (
        Fused(), fused(PackedColwiseParallel([1, 1, 1, 2]), PackedRowwiseParallel([1, 2])), FUSED_CUTS
    ),
    "blocks_as_sizes": lambda: (
        Fused(), fused(PackedColwiseParallel((8, 8, 8, 16)), PackedRowwiseParallel((8, 16))), FUSED_CUTS
    ),
    "blocks_left_on_the_linear": lambda: (
        Fused(), fused(PackedColwiseParallel(), PackedRowwiseParallel()), FUSED_CUTS
    ),
    "blocks_as_a_function_of_the_linear": lambda: (
        Fused(),
        fused(
            PackedColwiseParallel(lambda linear: [linear.in_features] * 3 + [linear.out_features - 24]),
            PackedRowwiseParallel(lambda linear: [linear.in_features // 3, 16]),
        ),
        FUSED_CUTS,
    ),
    "markers_of_diffusers_with_blocks": lambda: (Fused(), diffusers_fused([1, 1, 1, 2], [8, 16]), FUSED_CUTS),
    "markers_of_diffusers_without_blocks": lambda: (Fused(), diffusers_fused(None, None), FUSED_CUTS),
    "shard_parameter": lambda: (
        Scaled(),
        {**PAIR, "scale": ShardParameter(0), "table": ShardParameter(-1)},
        PAIR_CUTS | {"scale": (0, [12]), "table": (1, [12])},
    ),
    "slice_output": lambda: (Rotary(), {**PAIR, "rope": SliceOutput(-1)}, PAIR_CUTS),
    "divide_and_norms_within_a_head": lambda: (
        nn.Sequential(Attention()),
        {f"0.{key}".rstrip("."): style for key, style in ATTENTION.items()},
        {f"0.{key}": cut for key, cut in (ATTENTION_CUTS | {"to_out.weight": (1, [16])}).items()},
    ),
}  # fmt: skip


def run_case(group, name):
    """The sharded and the whole model after a forward and a backward pass on one input, and the cuts."""
    model, plan, cuts = CASES[name]()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = small_integers(*parameter.shape, seed=seed)
    whole, results = copy.deepcopy(model), []
    for module in (whole, apply(model, plan, group=group)):
        x = small_integers(2, 3, 8, seed=100).requires_grad_()
        y = module(x)
        y.backward(small_integers(*y.shape, seed=200))
        results.append((y, x.grad))
    return model, whole, results, cuts


def compare(group, name):
    """The names of whatever differs from the unsharded model by a single bit."""
    model, whole, results, cuts = run_case(group, name)
    (wanted, wanted_grad), (got, got_grad) = results
    full = dict(whole.named_parameters())
    wrong = [] if torch.equal(got, wanted) else ["the output"]
    wrong += [] if torch.equal(got_grad, wanted_grad) else ["the gradient of the input"]
    wrong += [] if model.state_dict().keys() == whole.state_dict().keys() else ["the keys"]
    for key, parameter in model.named_parameters():
        mine = (full[key], full[key].grad)
        if key in cuts:
            mine = tuple(cut(tensor, *cuts[key], group.rank, group.size) for tensor in mine)
        wrong += [] if torch.equal(parameter, mine[0]) else [key]
        wrong += [] if torch.equal(parameter.grad, mine[1]) else [f"the gradient of {key}"]
        # A gradient of zeros would agree with anything.
        wrong += [] if mine[1].count_nonzero() else [f"the gradient of {key} is zero"]
    return wrong


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("case", CASES)
def test_output_shards_and_gradients_equal_the_unsharded_model(ranks, case, size):
    assert ranks(size, compare, case) == [[]] * size


class Normed(Pair):
    def __init__(self, norm):
        super().__init__()
        self.norm = norm

    def forward(self, x):
        return self.down(self.norm(self.up(x)))


NORMS = {
    "of_torch": lambda: nn.RMSNorm(12, eps=1e-3),
    "of_torch_without_eps": lambda: nn.RMSNorm(12),
    "of_torch_without_weight": lambda: nn.RMSNorm(12, elementwise_affine=False),
    "of_diffusers": lambda: DiffusersRMSNorm(12, eps=1e-3),
    "of_diffusers_with_bias": lambda: DiffusersRMSNorm(12, eps=1e-3, bias=True),
    "of_diffusers_without_weight": lambda: DiffusersRMSNorm(12, eps=1e-3, elementwise_affine=False),
}


def norm_errors(group, name):
    """The relative error of the output and of every gradient, and how far a norm over local channels would be off."""
    model = randomise(Normed(NORMS[name]()))
    # One huge head.
    model.up.weight.data[:3] *= 20
    x, weights = torch.randn(5, 8, generator=torch.Generator().manual_seed(1)), torch.arange(20.0).view(5, 4) - 10
    whole = copy.deepcopy(model)
    apply(model, {**PAIR, "norm": "rms_norm"}, group=group)
    for module in (whole, model):
        (module(x) * weights).sum().backward()
    cuts = PAIR_CUTS | {f"norm.{key}": (0, [12]) for key, _ in whole.norm.named_parameters()}
    full = {key: parameter.grad for key, parameter in whole.named_parameters()}
    mine = {key: cut(grad, *cuts[key], group.rank, group.size) if key in cuts else grad for key, grad in full.items()}
    local = copy.deepcopy(model)
    local.norm.forward = lambda h: nn.functional.rms_norm(h, h.shape[-1:], local.norm.weight, 1e-3)
    with torch.no_grad():
        errors = [relative_error(model(x), whole(x)), relative_error(local(x), whole(x))]
    return *errors, max(relative_error(parameter.grad, mine[key]) for key, parameter in model.named_parameters())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("norm", NORMS)
def test_rms_norm_normalises_over_the_full_width(ranks, norm, size):
    for error, local, gradients in ranks(size, norm_errors, norm):
        assert error <= FLOAT32
        assert gradients <= FLOAT32
        assert local > 0.03 or size == 1


def test_divide_sets_integers_on_the_module_itself():
    module = Attention()
    assert Divide("heads", "kv_heads").shard(module, Group(3, 4)) is module
    assert (module.heads, module.kv_heads) == (2, 1)
    assert type(module.heads) is int


def test_every_name_of_a_style_and_every_marker_is_one():
    assert {"colwise", "rowwise", "rowwise_split_input", "colwise_gather", "rms_norm"} <= set(STYLES)
    assert all(style_of(name) is STYLES[name] for name in STYLES)
    ours = PackedColwiseParallel([1, 2])
    assert style_of(ours) is ours
    assert style_of(tensor_parallel.PackedColwiseParallel([1, 2])) == ours
    assert style_of(tensor_parallel.PackedRowwiseParallel()) == PackedRowwiseParallel()
