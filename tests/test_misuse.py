"""What people do to a sharded model, or around sharding, that would go wrong silently: refused, or right."""

import threading
import time

import pytest
import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from torch import nn

import tp_layers
from close import randomise
from families import FAMILIES
from pair import PLAN, Pair
from tp_layers import ColwiseLinear, RowwiseLinear
from tp_layers.group import Group
from tp_layers.layers.options import Options
from tp_layers.loader.build import build


class Holder(nn.Module):
    """A model whose sharded part is inside another module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def wrapped(model: nn.Module) -> nn.Module:
    model.up = torch.compile(model.up, backend="eager")
    return model


def replaced(model: nn.Module) -> nn.Module:
    model.up = nn.Linear(8, 16)
    return model


CHANGED = {
    "a layer wrapped": (wrapped, "'up.weight' is gone: do this before wrapping"),
    "a layer replaced": (replaced, r"'up.weight' is \(16, 8\), not a shard of"),
    "the model held by another": (Holder, "is not sharded by tp_layers: its 'inner' is"),
}


def refusal_of_save(group: Group, name: str, folder: str) -> str:
    model = tp_layers.apply(randomise(Pair()), PLAN, group=group)
    with pytest.raises(ValueError, match=CHANGED[name][1]) as error:
        tp_layers.save(CHANGED[name][0](model), folder)
    return str(error.value)


@pytest.mark.parametrize("name", CHANGED)
def test_a_model_changed_after_sharding_is_not_saved_as_if_it_were_whole(ranks, tmp_path, name):
    said = ranks(2, refusal_of_save, name, str(tmp_path))
    assert said[0] == said[1] and not list(tmp_path.iterdir())


def test_a_compiled_model_is_saved_as_the_model_it_compiles(tmp_path):
    model = tp_layers.apply(randomise(Pair()), PLAN, group=Group())
    tp_layers.save(torch.compile(model, backend="eager"), tmp_path)
    assert (tmp_path / "model.safetensors").is_file()


def test_projections_fused_after_sharding_are_refused(tmp_path):
    model = tp_layers.apply(FAMILIES["FluxTransformer2DModel"].build(), group=Group())
    with pytest.raises(NotImplementedError, match="projections fused: fuse them before sharding"):
        model.fuse_qkv_projections()
    with torch.no_grad():
        attention = model.transformer_blocks[0].attn
        with pytest.raises(NotImplementedError, match="projections fused: fuse them before sharding"):
            attention.fuse_projections()
        type(attention).fuse_projections(attention)
    with pytest.raises(ValueError, match="were fused after sharding"):
        tp_layers.save(model, tmp_path)


class Slow(ModelMixin, ConfigMixin):
    """A diffusers model that takes its time to be built."""

    @register_to_config
    def __init__(self, seconds: float = 0.3) -> None:
        super().__init__()
        time.sleep(seconds)
        self.linear = nn.Linear(2, 2)


class Computed(ModelMixin, ConfigMixin):
    """A model with a buffer made from a parameter."""

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("table", self.scale.detach() * 2, persistent=False)


def test_building_for_a_load_leaves_other_threads_alone():
    threads = [threading.Thread(target=build, args=(Slow, {"seconds": seconds})) for seconds in (0.3, 0.5)]
    for thread in threads:
        thread.start()
    time.sleep(0.1)
    during = nn.Linear(3, 3).weight.device.type
    for thread in threads:
        thread.join()
    assert (during, nn.Linear(3, 3).weight.device.type) == ("cpu", "cpu")


def test_a_buffer_computed_from_a_parameter_is_refused():
    with pytest.raises(ValueError, match=r"computes its buffers \['table'\] from parameters"):
        build(Computed, {})


def test_a_process_of_several_without_a_process_group_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="init_process_group first"):
        tp_layers.apply(Pair(), PLAN)
    tp_layers.apply(Pair(), PLAN, group=Group())


def test_frozen_weights_in_place_with_a_trained_bias_are_refused():
    linear = nn.Linear(8, 8)
    linear.weight.requires_grad_(False)
    layer = ColwiseLinear.from_linear(linear, group=Group(0, 2), options=Options(copy=False))
    with pytest.raises(ValueError, match="copy=False is for inference"):
        layer(torch.ones(1, 8))


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize("kind", [ColwiseLinear, RowwiseLinear])
def test_layers_by_hand_take_plain_linears_alone(kind):
    with pytest.raises(ValueError, match="it is a Scaled, not a plain"):
        kind.from_linear(Scaled(4, 4), group=Group())
    with pytest.raises(ValueError, match="parametrised"):
        kind.from_linear(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), group=Group())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, "float32"], ids=str)
def test_a_dtype_that_nothing_can_be_computed_in_is_refused(dtype, tmp_path):
    model = Pair()
    with pytest.raises(ValueError, match="reduce_dtype must be"):
        tp_layers.apply(model, PLAN, group=Group(), reduce_dtype=dtype)
    assert type(model.up) is nn.Linear
    with pytest.raises(ValueError, match="dtype must be"):
        tp_layers.load(Slow, tmp_path, dtype=dtype)


def test_a_model_with_a_sharded_part_is_refused():
    with pytest.raises(ValueError, match=r"'inner.*' is sharded already"):
        tp_layers.apply(Holder(tp_layers.apply(Pair(), PLAN, group=Group())), {"inner.up": "colwise"}, group=Group())
