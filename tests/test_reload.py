"""`reload`: another checkpoint's weights in a sharded model, in the memory it has, or nothing changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tp_layers
from checkpoints import CLASSES, state_of
from close import randomise
from families import FAMILIES, run
from memory import Live
from reload_case import right, two_toys
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.loader.staging import STAGE_BYTES

ONE = Group()


@pytest.fixture
def toys(tmp_path) -> tuple[Path, Path]:
    """The folders of two `Toy`s of other weights."""
    return two_toys(tmp_path)


def swap(group: Group, name: str, first: Path, second: Path, dtype: torch.dtype | None) -> dict[str, Any]:
    """A model of one checkpoint reloaded from the other, and a fresh one of the other."""
    model = tp_layers.load(CLASSES[name], first, group=group, dtype=dtype)
    before = {key: (id(tensor), tensor.data_ptr()) for key, tensor in model.state_dict(keep_vars=True).items()}
    returned, report = tp_layers.reload(model, second, report=True)
    after = {key: (id(tensor), tensor.data_ptr()) for key, tensor in model.state_dict(keep_vars=True).items()}
    fresh, loading = tp_layers.load(CLASSES[name], second, group=group, dtype=dtype, report=True)
    inputs = FAMILIES[name].inputs()

    def output() -> list[torch.Tensor]:
        return run(model, inputs, dtype)

    return {
        "same": returned is model and before == after and right(model, state_of(second)),
        "read": (report.bytes_read, report.bytes_held) == (loading.bytes_read, loading.bytes_held),
        "equal": all(torch.equal(a, b) for a, b in zip(output(), run(fresh, inputs, dtype), strict=True)),
        "moved": not torch.equal(output()[0], run(tp_layers.reload(model, first), inputs, dtype)[0]),
        "name": model.config._name_or_path == str(first),
    }


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["as it is", "bfloat16 from float32"])
@pytest.mark.parametrize("name", ["Flux2Transformer2DModel", "QwenImageTransformer2DModel"])
@pytest.mark.parametrize("size", [1, 2, 4], ids=["one rank", "two ranks", "four ranks"])
def test_a_reloaded_model_is_the_other_one_in_the_same_memory(ranks, tmp_path, name, size, dtype):
    first, second = tmp_path / "first", tmp_path / "second"
    FAMILIES[name].build().save_pretrained(first)
    randomise(FAMILIES[name].build(), seed=7).save_pretrained(second, max_shard_size="100KB")
    for result in ranks(size, swap, name, first, second, dtype):
        assert result == dict.fromkeys(result, True)


def test_every_kind_of_tensor_is_replaced(toys):
    model = tp_layers.load(Toy, toys[0], plan=PLAN, group=ONE)
    parameters, rope = dict(model.named_parameters()), [table.clone() for table in model.rope]
    assert tp_layers.reload(model, toys[1]) is model and right(model, state_of(toys[1]))
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert model.embed.weight is model.head.weight and not model.shift.requires_grad and model.up.weight.requires_grad
    assert all(torch.equal(table, kept) for table, kept in zip(model.rope, rope, strict=True))
    assert model.config._name_or_path == str(toys[1])


def test_a_model_sharded_by_apply_and_a_compiled_one(toys):
    model = tp_layers.apply(randomise(Toy(), seed=5), PLAN, group=ONE)
    compiled = torch.compile(model, backend="eager")
    x, before = torch.ones(2, 6), compiled(torch.ones(2, 6))
    assert tp_layers.reload(compiled, toys[1]) is compiled and right(model, state_of(toys[1]))
    fresh = tp_layers.load(Toy, toys[1], plan=PLAN, group=ONE)
    assert torch.equal(compiled(x), fresh(x)) and not torch.equal(before, fresh(x))


def test_an_optimiser_goes_on_with_the_new_values(toys):
    model = tp_layers.load(Toy, toys[0], plan=PLAN, group=ONE)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5)
    tp_layers.reload(model, toys[1])
    model(torch.ones(2, 6)).sum().backward()
    wanted = model.up.weight.detach() - 0.5 * model.up.weight.grad
    optimiser.step()
    assert torch.equal(model.up.weight, wanted)


def test_no_tensor_beside_the_model(tmp_path):
    save_toy(tmp_path, width=256, hidden=512)
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=Group(0, 2))
    with Live() as live:
        tp_layers.reload(model, tmp_path)
    # Samples of what is whole, which the ranks compare.
    assert live.peak < 4096
    model = tp_layers.load(Toy, tmp_path, plan=PLAN, group=Group(0, 2), dtype=torch.bfloat16)
    with Live() as live:
        tp_layers.reload(model, tmp_path)
    assert live.peak <= STAGE_BYTES


def test_a_plain_module_is_reloaded_too(tmp_path):
    plan = {"0": "colwise", "1": "rowwise"}

    def pair(seed: int) -> nn.Sequential:
        return randomise(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)), seed)

    other = tp_layers.apply(pair(3), plan, group=ONE)
    tp_layers.save(other, tmp_path)
    model = tp_layers.apply(pair(0), plan, group=ONE)
    assert torch.equal(tp_layers.reload(model, tmp_path)(torch.ones(1, 4)), other(torch.ones(1, 4)))


def test_a_subclass_takes_the_weights_of_its_base(toys):
    class Own(Toy):
        pass

    model = tp_layers.load(Own, toys[0], plan=PLAN, group=ONE)
    assert right(tp_layers.reload(model, toys[1]), state_of(toys[1]))
