"""The families with experts: one all-reduce for each of their MLPs, and the gradients of all that is in them."""

import pytest
import torch

import tp_layers
from calls import Calls
from close import FLOAT32, relative_error
from families import REGISTERED, run
from families.family import tensors
from tp_layers.plans.registry import plan_for
from tp_layers.plans.shard import sharding_of

LABELS = [name for name in REGISTERED if name.startswith(("HiDream", "Nucleus"))]


def sharded(group, label):
    model = REGISTERED[label].build()
    return tp_layers.apply(model, plan_for(model, modulation="sharded"), group=group, check_inputs=False)


def collectives(group, label):
    """The collectives of a forward call: within each module that adds partial sums, in all, and those described."""
    model = sharded(group, label)
    adders = [path for path, style in sharding_of(model).resolved.styles.items() if style.input == "partial"]
    found, started = dict.fromkeys(adders, 0), []
    with Calls() as calls:
        for path in adders:
            # Before the module's own hooks, and after them.
            module = model.get_submodule(path)
            module.register_forward_pre_hook(lambda *_: started.append(len(calls.names)), prepend=True)
            module.register_forward_hook(
                lambda *_, path=path: found.update({path: len(calls.names) - started.pop()}), always_call=True
            )
        run(model, REGISTERED[label].inputs())
    return found, len(calls.names), sum(item.count for item in tp_layers.describe(model).collectives)


@pytest.mark.parametrize("label", LABELS)
def test_there_is_one_all_reduce_for_each_mlp(ranks, label):
    for found, ran, described in ranks(2, collectives, label):
        assert found and set(found.values()) == {1}
        assert ran == described


def gradients(group, label):
    """Of a loss in training mode, in float64: by name, whole."""
    family, found = REGISTERED[label], []
    for model in (family.build(), sharded(group, label)):
        model = torch.nn.Module.double(model).train()
        inputs = {
            key: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
            for key, value in family.inputs().items()
        }
        (y,) = tensors(model(**inputs, return_dict=False))
        (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
        found.append({key: parameter.grad for key, parameter in model.named_parameters()})
    whole, mine = found
    for key, spec in sharding_of(model).resolved.specs.items():
        whole[key] = spec.take(whole[key], group.rank, group.size)
    errors = {key: relative_error(mine[key], grad) for key, grad in whole.items() if grad is not None and grad.norm()}
    return errors, len(whole)


# The grouped product is not one of float64.
@pytest.mark.parametrize("label", [name for name in LABELS if "grouped" not in name])
def test_all_gradients_equal_the_unsharded_model(ranks, label):
    for errors, count in ranks(2, gradients, label):
        # An expert may get no token, and Nucleus has a norm that nobody calls.
        assert len(errors) > 0.9 * count
        assert any(".gate." in key for key in errors) == ("without" not in label)
        assert {key: error for key, error in errors.items() if error > FLOAT32} == {}
