"""Partial sums of many layers, added by one all-reduce where the module around them ends; exact in small integers."""

import copy
import pickle

import pytest
import torch

from calls import Calls
from experts import CUTS, PLANS, WIDTH, Bare, Experts, build
from small_models import cut, small_integers
from tp_layers import apply, describe, verify
from tp_layers.describe import Collective
from tp_layers.group import Group

SIZES = [1, 2, 4]
kinds = pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)


def train(model):
    """The output, and the gradients of the input and of all parameters."""
    x = small_integers(7, WIDTH, seed=100).requires_grad_()
    y = model(x)
    y.backward(small_integers(*y.shape, seed=200))
    return y.detach(), x.grad, {key: parameter.grad for key, parameter in model.named_parameters()}


def counted(model):
    """The collectives forward, and forward and backward."""
    with Calls() as forward:
        model(small_integers(7, WIDTH, seed=100))
    with Calls() as both:
        train(model)
    return len(forward.names), len(both.names)


def compare(group, kind, change=lambda model: model, count=counted):
    """The names of what differs from the unsharded model by a single bit, and the number of collectives."""
    model = change(apply(build(kind), PLANS[kind], group=group))
    y, x_grad, grads = train(build(kind))
    got_y, got_x_grad, got = train(model)
    wrong = [] if torch.equal(got_y, y) else ["the output"]
    wrong += [] if torch.equal(got_x_grad, x_grad) else ["the gradient of the input"]
    for key, grad in grads.items():
        mine = cut(grad, *CUTS[key], group.rank, group.size) if key in CUTS else grad
        wrong += [] if torch.equal(got[key], mine) and grad.count_nonzero() else [key]
    return wrong, count(model)


@kinds
@pytest.mark.parametrize("size", SIZES)
def test_outputs_and_all_gradients_equal_the_unsharded_model(ranks, kind, size):
    # Backward: the two tensors that enter, and the router's gradient.
    assert ranks(size, compare, kind) == [([], (1, 1 + 3) if size > 1 else (0, 0))] * size


def copied(model):
    train(model)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    return twin


@kinds
def test_a_copy_is_trained_as_its_original(ranks, kind):
    assert ranks(2, compare, kind, copied) == [([], (1, 1 + 3))] * 2


def pickled(model):
    return pickle.loads(pickle.dumps(model))


@kinds
def test_a_model_sharded_on_one_rank_can_be_pickled(kind):
    assert compare(Group(), kind, pickled) == ([], (0, 0))


def compiled(model):
    torch._dynamo.reset()
    model.compile(fullgraph=True, backend="aot_eager")
    return model


def uncounted(model):
    return None  # Counting does not go with compiling.


@pytest.mark.parametrize("size", [1, 2])
def test_compiled_into_one_graph_it_is_the_same(ranks, size):
    # Not the routed one, which takes branches that depend on the data.
    assert ranks(size, compare, Bare, compiled, uncounted) == [([], None)] * size


@kinds
def test_describe_counts_one_all_reduce_for_all_experts(kind):
    before = describe(build(kind), PLANS[kind], size=2)
    assert before.collectives == [Collective("all-reduce", 1, WIDTH * 8)]
    assert describe(apply(build(kind), PLANS[kind], group=Group(0, 2))) == before


def verdict(group, kind, without):
    plan = {key: style for key, style in PLANS[kind].items() if key not in without}
    return verify(build(kind), small_integers(7, WIDTH, seed=100), plan, group=group, check=False)


@kinds
def test_verify_compares_the_sum_and_not_its_terms(ranks, kind):
    for found in ranks(2, verdict, kind, []):
        assert found.ok and {"moe", "moe.router"} <= {item.path for item in found.layers}


def test_verify_finds_a_sum_that_nobody_takes_and_an_expert_counted_twice(ranks):
    for without, path in ((["moe"], "moe.experts."), (["moe.shared.gate_up", "moe.shared.down"], "moe")):
        for found in ranks(2, verdict, Experts, without):
            assert not found.ok and found.first_wrong.path.startswith(path)


class Returns(torch.nn.Module):
    """A module around one layer, which returns `function` of its output."""

    def __init__(self, function):
        super().__init__()
        self.up, self.down = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)
        self.function, self.kept = function, None

    def forward(self, x):
        self.kept = self.down(self.up(x))
        return self.function(self.kept)


PLAN = {"0": "all_reduce_output", "0.up": "colwise", "0.down": "rowwise_partial"}


def returned(group, function, dtype, rows, options):
    """The output, and the partial sum that the module has kept, where this rank's part of the layers gives `rows`."""
    model = torch.nn.Sequential(Returns(function)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model[0].up.bias.data, model[0].down.weight.data[:] = torch.tensor(rows, dtype=dtype), 1
    apply(model, PLAN, group=group, **options)
    with torch.no_grad():
        y = model(torch.zeros(3, 4, dtype=dtype))
    return y, model[0].kept


def itself(x):
    return x


def transposed(x):
    return x.unsqueeze(0).transpose(0, 2)


def test_a_tensor_that_the_module_keeps_stays_as_it_is(ranks):
    for rank, (y, kept) in enumerate(ranks(4, returned, itself, torch.float32, [1.0, 2, 3, 4], {})):
        assert torch.equal(y, torch.full((3, 2), 10.0)) and torch.equal(kept, torch.full((3, 2), rank + 1.0))


def test_an_output_of_any_strides_is_added(ranks):
    for y, _ in ranks(2, returned, transposed, torch.float32, [1.0, 2, 3, 4], {}):
        assert torch.equal(y, torch.full((2, 3, 1), 10.0))


def test_the_sum_is_rounded_once_where_that_is_asked_for(ranks):
    # In bfloat16 256 + 1 is 256 again, and 259 is 260.
    for reduce_dtype in (torch.float32, None):
        options = {"reduce_dtype": reduce_dtype}
        for y, _ in ranks(4, returned, itself, torch.bfloat16, [256.0, 1, 1, 1], options):
            assert y.dtype == torch.bfloat16 and (y == 260).all() == (reduce_dtype is not None)


def in_a_tuple(x):
    return (x,)


def test_several_outputs_are_refused():
    with pytest.raises(TypeError, match="adds the one tensor that a module returns; Returns returns a tuple"):
        returned(Group(), in_a_tuple, torch.float32, [0.0] * 4, {})


BIAS = {torch.float64: 1e12, torch.float32: 1e6, torch.bfloat16: 1e6, torch.float16: 1e4}


def bias_alone(group, dtype):
    model = torch.nn.Sequential(Returns(itself)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    bias = torch.randn(2, generator=torch.Generator().manual_seed(1)) * BIAS[dtype]
    model[0].down.bias.data = bias.to(dtype)
    apply(model, PLAN, group=group)
    return torch.equal(model(torch.zeros(3, 4, dtype=dtype)), bias.to(dtype).expand(3, 2))


@pytest.mark.parametrize("dtype", BIAS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_bias_is_added_once(ranks, size, dtype):
    assert all(ranks(size, bias_alone, dtype))
