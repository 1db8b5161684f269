"""`apply`: whatever the plan does not name is carried over untouched, and ranks with unlike weights are refused."""

import copy

import pytest
import torch
from torch import nn

from families import FAMILIES
from stack import STACK, Stack
from tp_layers import apply
from tp_layers.plans.shard import sharding_of

FLUX = FAMILIES["FluxTransformer2DModel"]


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


def in_a_buffer(model, rank):
    model.blocks[1].register_buffer("frequencies", torch.arange(1.0, 9.0) * (1 + rank))


def in_a_complex_buffer(model, rank):
    model.blocks[0].register_buffer("turns", torch.full((4,), 1 + 1j * rank), persistent=False)


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
    "a_buffer": (2, in_a_buffer, "blocks.1.frequencies"),
    "a_complex_buffer": (2, in_a_complex_buffer, "blocks.0.turns"),
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
