"""What each style does to a model: on 1, 2 and 4 ranks the outputs and every gradient of the unsharded one.

The models compute in small integers, so that sums are exact in any order; only norms are compared within rounding. What
a rank holds is compared with a cut written out by hand.
"""

import copy
import pickle
from typing import NamedTuple

import pytest
import torch
from diffusers.hooks import tensor_parallel
from diffusers.models.normalization import RMSNorm as DiffusersRMSNorm
from torch import nn

from close import FLOAT32, randomise, relative_error
from tp_layers import Divide, PackedColwiseParallel, PackedRowwiseParallel, ShardParameter, SliceOutput, apply
from tp_layers.group import Group
from tp_layers.plans.styles import STYLES, style_of

SIZES = [1, 2, 4]


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Scaled(Pair):
    """The channels between the two layers have a scale and a table of their own."""

    def __init__(self):
        super().__init__()
        self.scale, self.table = nn.Parameter(torch.ones(12)), nn.Parameter(torch.ones(3, 12))

    def forward(self, x):
        return self.down(self.up(x) * self.scale + self.table)


class Fused(nn.Module):
    """q, k, v and an MLP of twice their width in one projection; attention and MLP side by side in the other."""

    def __init__(self):
        super().__init__()
        self.fused, self.out = nn.Linear(8, 40), nn.Linear(24, 4)
        self.fused._tp_packed_col_blocks, self.out._tp_packed_row_blocks = [8, 8, 8, 16], [8, 16]

    def forward(self, x):
        h = self.fused(x)
        width = h.shape[-1] // 5
        q, k, v, mlp = h.split([width, width, width, 2 * width], dim=-1)
        return self.out(torch.cat([q * k + v, mlp.relu()], dim=-1))


class ScaleNorm(nn.Module):
    """A norm's weight without the norm."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Attention(nn.Module):
    """Linear attention of 8 heads over 4 key and value heads, with norms within a head, before and after it."""

    def __init__(self):
        super().__init__()
        self.heads, self.kv_heads = 8, 4
        self.before, self.norm_q, self.norm_k, self.after = (ScaleNorm(width) for width in (8, 2, 2, 4))
        self.to_q, self.to_k, self.to_v, self.to_out = (
            nn.Linear(8, 16), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(16, 4)
        )  # fmt: skip

    def forward(self, x):
        x = self.before(x)
        q = self.norm_q(self.to_q(x).unflatten(-1, (self.heads, 2)))
        k = self.norm_k(self.to_k(x).unflatten(-1, (self.kv_heads, 2)))
        v = self.to_v(x).unflatten(-1, (self.kv_heads, 2))
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, dim=-2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k)
        return self.after(self.to_out(torch.einsum("bhqk,bkhd->bqhd", scores, v).flatten(-2)))


class Table(nn.Module):
    def forward(self, x):
        return torch.arange(12.0, dtype=x.dtype) % 5 - 2, (torch.arange(12.0, dtype=x.dtype) % 3, "a name")


class Rotary(Pair):
    """A table over the full width, of which each rank needs its channels."""

    def __init__(self):
        super().__init__()
        self.rope = Table()

    def forward(self, x):
        cos, (sin, _) = self.rope(x)
        h = self.up(x)
        return self.down(h * cos + sin)


class Alone(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.reader = nn.Linear(8, 12), nn.Linear(12, 4)

    def forward(self, x):
        return self.reader(self.linear(x))


PAIR = {"up": "colwise", "down": "rowwise"}
PAIR_CUTS = {"up.weight": (0, [12]), "up.bias": (0, [12]), "down.weight": (1, [12])}
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


def cut(full, dim, blocks, rank, size):
    """This rank's part of every block, by hand."""
    return torch.cat([block.chunk(size, dim)[rank] for block in full.split(blocks, dim)], dim)


def integers(*shape, seed):
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).double()


def run_case(group, name):
    """The sharded and the whole model after a forward and a backward pass on one input, and the cuts."""
    model, plan, cuts = CASES[name]()
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    whole, results = copy.deepcopy(model), []
    for module in (whole, apply(model, plan, group=group)):
        x = integers(2, 3, 8, seed=100).requires_grad_()
        y = module(x)
        y.backward(integers(*y.shape, seed=200))
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
