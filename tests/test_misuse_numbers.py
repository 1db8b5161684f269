"""Options and checks that must not be lost on the way: a later cast, autocast, an output of another type."""

import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers import Flux2Transformer2DModel
from torch import nn

import tp_layers
from close import randomise, relative_error
from families import FAMILIES
from pair import PLAN, Pair
from tp_layers import Divide, RowwiseLinear, SliceOutput
from tp_layers.cli import main
from tp_layers.group import Group
from tp_layers.layers.options import Options
from tp_layers.plans.resolve import resolve
from tp_layers.plans.spec import ShardSpec

HALF = torch.bfloat16


def reduced(group: Group) -> dict[str, tuple[float, float]]:
    """(error with reduce_dtype, without), of one layer against float64: cast afterwards, and under autocast."""
    x = torch.randn(64, 384, generator=torch.Generator().manual_seed(1)).to(HALF)
    share = ShardSpec.of(-1, 384).take(x, group.rank, group.size)
    exact_layer = randomise(nn.Linear(384, 96)).to(HALF).double()
    exact = exact_layer(x.double()).detach()
    found = {}
    for name in ("cast afterwards", "autocast"):
        errors = []
        for wanted in (torch.float32, None):
            linear = randomise(nn.Linear(384, 96)).to(HALF).float()
            layer = RowwiseLinear.from_linear(linear, group=group, options=Options(reduce_dtype=wanted))
            with torch.no_grad(), torch.autocast("cpu", HALF, enabled=name == "autocast"):
                y = layer(share) if name == "autocast" else layer.to(HALF)(share)
            assert y.dtype == HALF
            errors.append(relative_error(y, exact))
        found[name] = (errors[0], errors[1])
    return found


def test_a_reduction_in_float32_survives_a_cast_and_autocast(ranks):
    for found in ranks(4, reduced):
        for wide, own in found.values():
            assert wide < 0.8 * own


@dataclass
class Output:
    sample: Any


class Returns(Pair):
    """The pair's output in a dataclass, or in nothing that verify can look into."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> Any:
        return self.wrap(super().forward(x))


WRONG = {"up": "colwise", "down": "rowwise_split_input"}


def verdicts(group: Group) -> list[bool]:
    model, x = randomise(Returns(Output)), torch.ones(3, 8)
    right = tp_layers.verify(model, x, PLAN, group=group)
    wrong = tp_layers.verify(model, x, WRONG, group=group, check=False)
    split = tp_layers.verify(
        randomise(Pair()), x, {"up": "rowwise_split_input", "down": "colwise"}, group=group, check=False
    )
    assert "its output is split" in str(split)
    return [right.ok and right.error < 1e-6, wrong.ok, split.ok]


def test_verify_looks_into_dataclasses_and_sees_a_split_output(ranks):
    assert ranks(2, verdicts) == [[True, False, False]] * 2


def test_verify_refuses_an_output_that_it_cannot_compare():
    with pytest.raises(ValueError, match="returns no tensors that could be compared"):
        tp_layers.verify(randomise(Returns(str)), torch.ones(3, 8), PLAN, group=Group())


class Fixed(Pair):
    heads = 4

    @property
    def count(self) -> int:
        return 4


@pytest.mark.parametrize("name", ["heads", "count"])
def test_an_attribute_that_cannot_be_set_on_the_module_is_refused(name):
    model = nn.ModuleList([Fixed()])
    plan = {"0": Divide(name), "0.up": "colwise", "0.down": "rowwise"}
    with pytest.raises(ValueError, match="is no attribute of the module itself"):
        resolve(model, plan, 2)


def test_a_dim_that_an_output_lacks_is_named():
    module = SliceOutput(5).shard(nn.Identity(), Group(0, 2))
    with pytest.raises(ValueError, match=r"SliceOutput\(5\): Identity returns a tensor of shape \(2, 4\)"):
        module(torch.ones(2, 4))


def second_derivative(group: Group) -> str:
    model = tp_layers.apply(randomise(Pair()), PLAN, group=group)
    x = torch.ones(2, 8, requires_grad=True)
    (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError) as error:
        grad.sum().backward()
    return str(error.value)


def test_second_derivatives_are_refused(ranks):
    assert all("once_differentiable" in said for said in ranks(2, second_derivative))


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.norm_q, self.to_out = nn.Linear(8, 12), nn.RMSNorm(3), nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.to_out(self.norm_q(self.to_q(x).unflatten(-1, (-1, 3))).flatten(-2))


def with_another_parameter(group: Group) -> float:
    model = randomise(Head())
    model(torch.ones(2, 8)).sum().backward()
    wanted = model.norm_q.weight.grad.clone()
    model.zero_grad()
    tp_layers.apply(model, {"to_q": "colwise", "to_out": "rowwise"}, group=group)
    model.norm_q.weight = pickle.loads(pickle.dumps(model.norm_q.weight))
    model(torch.ones(2, 8)).sum().backward()
    return relative_error(model.norm_q.weight.grad, wanted)


def test_a_pickled_head_norm_weight_is_summed_too(ranks):
    assert max(ranks(2, with_another_parameter)) < 1e-6


def test_a_default_device_does_not_reach_the_files(tmp_path):
    FAMILIES["Flux2Transformer2DModel"].build().save_pretrained(tmp_path)
    with torch.device("meta"):
        model = tp_layers.load(Flux2Transformer2DModel, tmp_path, group=Group(), device="cpu")
        tp_layers.save(model, tmp_path / "again")
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_the_command_refuses_a_file_named_as_another_module(tmp_path, capsys):
    (tmp_path / "copy.py").write_text("def case(): ...\n")
    assert main(["verify", f"{tmp_path}/copy.py:case", "--size", "2"]) == 2
    assert "another module called 'copy'" in capsys.readouterr().err
