"""Split tensors of a plan come from somewhere and go somewhere, or resolve says so before anything is touched."""

import pytest
from diffusers.models.normalization import RMSNorm
from torch import nn

import tp_layers
from families import FAMILIES
from tp_layers.plans.registry import plan_for
from tp_layers.plans.resolve import resolve


class Block(nn.Module):
    """A norm of whole channels, which a plan may mistake for one of split channels, before an MLP."""

    def __init__(self):
        super().__init__()
        self.norm = RMSNorm(8, eps=1e-6, elementwise_affine=False)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


UNFED = {
    "a norm of whole channels": ({"blocks.*.norm": "rms_norm"}, "the input of 'blocks.0.norm' must be split"),
    "a rowwise alone": ({"blocks.*.down": "rowwise"}, "the input of 'blocks.0.down' must be split"),
    "a colwise in another block": (
        {"blocks.0.up": "colwise", "blocks.*.down": "rowwise"},
        "the input of 'blocks.1.down' must be split, and no module in 'blocks.1' gives a split output",
    ),
}


@pytest.mark.parametrize(("plan", "message"), UNFED.values(), ids=UNFED)
def test_a_split_input_that_nobody_gives_is_refused_unless_check_is_off(plan, message):
    with pytest.raises(ValueError, match=f"plan key '.*': {message}") as error:
        resolve(Model(), plan, 2)
    assert "check=False" in str(error.value)
    assert message in resolve(Model(), plan, 2, check=False).notes[0]
    assert message in str(tp_layers.describe(Model(), plan, size=2, check=False))


def test_a_pair_is_fed_and_read():
    assert resolve(Model(), {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, 2).notes == []


@pytest.mark.parametrize("name", FAMILIES)
def test_the_registered_plans_have_no_open_ends(name):
    model = FAMILIES[name].build()
    assert resolve(model, plan_for(model), 2).notes == []
