"""`apply`: one parameter in flight, whatever the plan does not name untouched, and the gradients of one device."""

import copy
import gc
import time
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from close import FLOAT32, relative_error
from families import FAMILIES
from test_styles import integers
from tp_layers import Divide, PackedColwiseParallel, ShardParameter, apply
from tp_layers.plans.shard import sharding_of

FLUX = FAMILIES["FluxTransformer2DModel"]


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


class Block(nn.Module):
    """Layers of unlike sizes, the largest neither first nor last, and each kind of a planned parameter."""

    def __init__(self, rows):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(64, rows), nn.RMSNorm(rows), nn.Linear(rows, 64)
        self.table = nn.Parameter(torch.ones(64, rows))
        self.whole = nn.Linear(64, 64)
        self.register_buffer("steps", torch.arange(64.0))
        self.register_buffer("cache", torch.ones(3), persistent=False)


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(rows) for rows in (64, 512, 128))


STACK = {
    "blocks.*.up": PackedColwiseParallel([1, 3]),
    "blocks.*.norm": "rms_norm",
    "blocks.*.table": ShardParameter(-1),
    "blocks.*.down": "rowwise",
}


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


def marked_stack():
    """Modes and `requires_grad` that alternate."""
    model = Stack()
    for index, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(index % 3 == 0)
    for index, module in enumerate(model.modules()):
        module.training = index % 2 == 0
    return model


def what_is_kept(group):
    torch.manual_seed(0)
    model = marked_stack()
    keys = list(model.state_dict())
    wanted = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    modes = {name: module.training for name, module in model.named_modules()}
    types = {name: parameter.dtype for name, parameter in model.named_parameters()}
    buffers, values = dict(model.named_buffers()), {name: b.clone() for name, b in model.named_buffers()}
    rest = [block.whole for block in model.blocks]
    weights = [(block.whole.weight, block.down.bias) for block in model.blocks]
    returned = apply(model, STACK, group=group)
    now = dict(model.named_buffers())
    return {
        "the_model": returned is model,
        "keys": list(model.state_dict()) == keys,
        "requires_grad": {name: p.requires_grad for name, p in model.named_parameters()} == wanted,
        "modes": {name: module.training for name, module in model.named_modules()} == modes,
        "dtypes": {name: parameter.dtype for name, parameter in model.named_parameters()} == types,
        "buffers": all(now[name] is buffers[name] and torch.equal(now[name], values[name]) for name in buffers),
        "whole_modules": [block.whole for block in model.blocks] == rest,
        "whole_parameters": all(
            block.whole.weight is weight and block.down.bias is bias
            for block, (weight, bias) in zip(model.blocks, weights, strict=True)
        ),
    }


@pytest.mark.parametrize("size", [1, 2, 4])
def test_everything_else_is_carried_over(ranks, size):
    for kept in ranks(size, what_is_kept):
        assert [name for name, held in kept.items() if not held] == []


def unlike(group, differ):
    """The error of applying to models that differ between the ranks, and whether the model is as it was."""
    torch.manual_seed(0)
    model = Stack()
    differ(model, group.rank)
    modules, tensors = dict(model.named_modules()), model.state_dict(keep_vars=True)
    try:
        apply(model, STACK, group=group)
    except ValueError as error:
        now = model.state_dict(keep_vars=True)
        same = dict(model.named_modules()) == modules and all(now[name] is tensors[name] for name in tensors)
        return str(error), same
    return "", False


def by_seed(model, rank):
    torch.manual_seed(rank)
    for parameter in model.blocks[1].parameters():
        nn.init.normal_(parameter)


def in_a_whole_parameter(model, rank):
    model.blocks[2].whole.bias.data[7] += rank


def on_the_last_rank(model, rank):
    model.blocks[0].norm.weight.data[0] = 2 if rank == 3 else 1


def by_nan(model, rank):
    model.blocks[0].norm.weight.data.fill_(float("nan") if rank else 1.0)


def beyond_the_first_column(model, rank):
    model.blocks[1].up.weight.data[:, 1:] += rank


DIFFERENCES = {
    "columns_but_the_first": (2, beyond_the_first_column, "blocks.1.up.weight"),
    "other_seeds": (2, by_seed, "blocks.1.table"),
    "a_parameter_that_stays_whole": (2, in_a_whole_parameter, "blocks.2.whole.bias"),
    "one_rank_of_four": (4, on_the_last_rank, "blocks.0.norm.weight"),
    "nan_on_one_rank": (2, by_nan, "blocks.0.norm.weight"),
}


@pytest.mark.parametrize(("size", "differ", "name"), DIFFERENCES.values(), ids=DIFFERENCES)
def test_ranks_with_unlike_weights_are_refused_on_every_rank(ranks, size, differ, name):
    for message, same in ranks(size, unlike, differ):
        assert f"the ranks hold different values of '{name}': load the same checkpoint on every rank" in message
        assert same


def alike(model, rank):
    for value, parameter in zip((float("nan"), float("inf"), -float("inf"), 0.0), model.parameters(), strict=False):
        parameter.data.fill_(value)
    model.blocks[2].up.weight.data.fill_(float("inf"))[64:] = -float("inf")


def test_ranks_with_equal_weights_are_not_refused_whatever_the_values(ranks):
    assert [message for message, _ in ranks(2, unlike, alike)] == ["", ""]


class ScaleNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 4
        self.norm, self.to_q, self.norm_q, self.to_out = ScaleNorm(6), nn.Linear(6, 8), ScaleNorm(2), nn.Linear(8, 6)

    def forward(self, x):
        return self.to_out(self.norm_q(self.to_q(self.norm(x)).unflatten(-1, (self.heads, 2))).flatten(-2))


def head_gradients(group, freeze):
    """The gradients of both norms, sharded and whole, after two backward passes."""
    model = nn.Sequential(Headed())
    for seed, parameter in enumerate(model.parameters()):
        parameter.data = integers(*parameter.shape, seed=seed)
    whole = copy.deepcopy(model)
    model[0].norm_q.requires_grad_(not freeze)
    plan = {"0": Divide("heads"), "0.to_q": "colwise", "0.to_out": "rowwise"}
    apply(model, plan, group=group)
    frozen = model[0].norm_q.weight.requires_grad is False
    model[0].norm_q.requires_grad_(True)
    for module in (model, whole):
        for seed in (10, 11):
            module(integers(5, 6, seed=seed)).backward(integers(5, 6, seed=seed + 10))
    return frozen, [(m[0].norm_q.weight.grad.tolist(), m[0].norm.weight.grad.tolist()) for m in (model, whole)]


@pytest.mark.parametrize("freeze", [False, True], ids=["trained_from_the_start", "thawed_after_sharding"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_gradient_of_a_head_norm_is_summed_and_of_no_other(ranks, size, freeze):
    for frozen, (got, wanted) in ranks(size, head_gradients, freeze):
        assert frozen is freeze
        assert got == wanted
        assert any(wanted[0])


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


def test_a_sharded_model_is_copied_with_its_output_and_its_keys():
    model = FLUX.build()
    with torch.no_grad():
        wanted, keys = model(**FLUX.inputs(), return_dict=False)[0], list(model.state_dict())
        apply(model)
        copied = copy.deepcopy(model)
        assert list(model.state_dict()) == list(copied.state_dict()) == keys
        assert torch.equal(copied(**FLUX.inputs(), return_dict=False)[0], wanted)
        # The copy's weights are its own.
        copied.x_embedder.weight.zero_()
        assert torch.equal(model(**FLUX.inputs(), return_dict=False)[0], wanted)
    assert sharding_of(copied) is not None
