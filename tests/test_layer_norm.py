"""AcrossLayerNorm: a norm over channels that are split over the ranks is the norm over all of them."""

import pytest
import torch
from diffusers.models.normalization import FP32LayerNorm
from torch import nn

import tp_layers
from close import FLOAT32, randomise, relative_error
from norms import DTYPES, SIZES, WIDTH, part, whole
from refused import refused
from seeded import noise
from tp_layers.group import Group
from tp_layers.layers.layer_norm import AcrossLayerNorm

NORMS = {
    "torch": lambda: nn.LayerNorm(WIDTH, eps=1e-6),
    "without a bias": lambda: nn.LayerNorm(WIDTH, bias=False),
    "without parameters": lambda: nn.LayerNorm(WIDTH, elementwise_affine=False),
    "a large eps": lambda: nn.LayerNorm(WIDTH, eps=0.5),
    "diffusers": lambda: FP32LayerNorm(WIDTH, eps=1e-6),
}


def outputs(group: Group, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return AcrossLayerNorm.from_norm(norm, group=group)(part(x, group))


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("size", SIZES)
def test_it_is_the_norm_over_all_ranks(ranks, size, name):
    norm = randomise(NORMS[name]())
    # The ranks' channels differ in mean and spread, far from zero.
    x = noise(3, 5, WIDTH) * torch.linspace(0.1, 3, WIDTH) + torch.linspace(90, 110, WIDTH)
    # diffusers' norm computes in float32 whatever it is given.
    twin = nn.LayerNorm(WIDTH, eps=norm.eps, elementwise_affine=norm.weight is not None, bias=norm.bias is not None)
    twin.load_state_dict(norm.state_dict())
    exact = whole(twin.double(), x.double())
    own = relative_error(whole(norm.float(), x), exact)
    for rank, got in enumerate(ranks(size, outputs, norm.float(), x)):
        assert got.dtype == torch.float32
        assert relative_error(got, part(exact, Group(rank, size))) <= 2 * own + FLOAT32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_precision_is_rounded_once(ranks, dtype):
    norm, x = randomise(NORMS["torch"]()).to(dtype), noise(64, WIDTH, dtype=dtype)
    wanted = whole(norm.double(), x.double()).to(dtype).double()
    for rank, got in enumerate(ranks(2, outputs, norm.to(dtype), x)):
        assert got.dtype == dtype
        error = (got.double() - part(wanted, Group(rank, 2))).abs() / part(wanted, Group(rank, 2)).abs().clamp_min(1)
        assert float(error.max()) <= torch.finfo(dtype).eps * (4 if dtype == torch.float32 else 1)


def gradients(group: Group, norm: nn.Module, x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    layer, leaf = AcrossLayerNorm.from_norm(norm, group=group), part(x, group).requires_grad_()
    layer(leaf).backward(part(grad, group))
    return [leaf.grad, layer.weight.grad, layer.bias.grad]


@pytest.mark.parametrize("size", SIZES)
def test_gradients_are_those_of_the_full_norm(ranks, size):
    norm, x, grad = randomise(NORMS["torch"]()).double(), noise(7, WIDTH).double() + 2, noise(7, WIDTH, seed=3).double()
    leaf = x.clone().requires_grad_()
    norm(leaf).backward(grad)
    wanted = [leaf.grad, norm.weight.grad, norm.bias.grad]
    for rank, found in enumerate(ranks(size, gradients, randomise(NORMS["torch"]()).double(), x, grad)):
        for got, full in zip(found, wanted, strict=True):
            assert relative_error(got, part(full, Group(rank, size))) <= 1e-13


class Model(nn.Module):
    """Attention's shape without attention: a projection, its norm over all channels, and the way back."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 4
        self.up, self.norm, self.down = nn.Linear(12, 32), nn.LayerNorm(32), nn.Linear(32, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


PLAN = {"up": "colwise", "norm": "layer_norm", "down": "rowwise"}


def sharded(group: Group, folder: str, uneven: bool) -> torch.Tensor:
    model = tp_layers.apply(randomise(Model()), PLAN, group=group, uneven=uneven)
    tp_layers.save(model, folder)
    with torch.no_grad():
        return model(noise(5, 12))


@pytest.mark.parametrize(("size", "uneven"), [(2, False), (4, False), (3, True)], ids=["two", "four", "unequal parts"])
def test_a_model_with_one_is_sharded_and_saved(ranks, tmp_path, size, uneven):
    wanted = whole(randomise(Model()), noise(5, 12))
    for got in ranks(size, sharded, str(tmp_path), uneven):
        assert relative_error(got, wanted) <= FLOAT32
    assert any(tmp_path.iterdir())


def test_describe_counts_its_collectives():
    (norm,) = [it for it in tp_layers.describe(Model(), PLAN, size=2).collectives if "squares" in it.kind]
    assert (norm.count, norm.bytes_per_row) == (1, 8)


def test_other_norms_and_widths_are_refused():
    model = Model()
    with refused(model, "'layer_norm' shards torch.nn.LayerNorm and diffusers' FP32LayerNorm, not Linear"):
        tp_layers.apply(model, {"up": "layer_norm", "down": "rowwise"}, group=Group(0, 2))
    with pytest.raises(ValueError, match=r"over one dim, this one is over \(4, 8\)"):
        AcrossLayerNorm.from_norm(nn.LayerNorm((4, 8)), group=Group(0, 2))
    with pytest.raises(ValueError, match="this norm takes 16 of 32 channels, its input has 32"):
        AcrossLayerNorm.from_norm(nn.LayerNorm(32), group=Group(0, 2))(noise(3, 32))
