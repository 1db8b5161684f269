"""Projections that `fuse_qkv_projections()` fused before sharding: the separate ones stay, and nobody reads them."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tp_layers
from close import FLOAT32, exactly, relative_error
from families import REGISTERED, Family, run
from tp_layers.group import Group
from tp_layers.plans.registry import plan_for
from tp_layers.plans.resolve import resolve

FLUX = REGISTERED["FluxTransformer2DModel"]
READERS = ("FluxTransformer2DModel", "LongCatImageTransformer2DModel", "MiniMaxH3Transformer3DModel")
# The separate projections, in the order in which diffusers concatenates them.
PARTS = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}


def fused(family: Family) -> nn.Module:
    """The family's model, its projections fused; what they compute stays the same."""
    model: Any = family.build()
    with torch.no_grad():
        model.fuse_qkv_projections()
    return model


def fusible() -> dict[str, tuple[nn.Module, list[str]]]:
    """Models whose class fuses something, on meta and fused, and the parameters it added.

    Other classes have no such method, or it fails, as it finds no `to_q` or queries and keys of other inputs, or it
    changes nothing.
    """
    found = {}
    for label, family in REGISTERED.items():
        with torch.device("meta"):
            model: Any = family.make()
            before = dict(model.named_parameters())
            with contextlib.suppress(AttributeError, RuntimeError):
                model.fuse_qkv_projections()
        added = [name for name, _ in model.named_parameters() if name not in before]
        found |= {label: (model, added)} if added else {}
    return found


FUSIBLE = fusible()


@pytest.mark.parametrize("label", FUSIBLE)
def test_the_plan_cuts_what_fusing_adds_where_the_separate_projections_begin(label):
    model, added = FUSIBLE[label]
    specs = resolve(model, plan_for(model), 2).specs
    for name in added:
        path, fusion, _ = name.rsplit(".", 2)
        parts = [model.get_submodule(f"{path}.{part}").out_features for part in PARTS[fusion]]
        assert specs[name].dim == 0 and list(specs[name].blocks) == parts, name


def outputs(group: Group, label: str, folder: str) -> list[torch.Tensor]:
    """Of the fused model, sharded; which is saved too."""
    model = tp_layers.apply(fused(REGISTERED[label]), group=group)
    tp_layers.save(model, folder)
    return run(model, REGISTERED[label].inputs())


@pytest.mark.parametrize("label", READERS)
def test_a_fused_model_equals_the_separate_one_and_is_saved_as_it_was(ranks, label, tmp_path):
    wanted = run(REGISTERED[label].build(), REGISTERED[label].inputs())
    stored = fused(REGISTERED[label]).state_dict()
    for size in (2, 4):
        folder = tmp_path / str(size)
        for got in ranks(size, outputs, label, str(folder)):
            assert all(relative_error(*pair) <= FLOAT32 for pair in zip(got, wanted, strict=True))
        saved = load_file(next(Path(folder).glob("*.safetensors")))
        assert saved.keys() == stored.keys() and all(exactly(saved[key], stored[key]) for key in stored)


@pytest.mark.parametrize("name", ["to_qkv", "to_added_qkv"])
def test_a_plan_without_what_is_fused_is_refused(name):
    model = fused(FLUX)
    plan = {key: style for key, style in plan_for(model).items() if not key.endswith(f".{name}?")}
    with pytest.raises(ValueError, match=rf"'.*attn' are fused, and its plan lacks \['{name}'\]: unfuse"):
        tp_layers.apply(model, plan)
    model.unfuse_qkv_projections()
    tp_layers.apply(model, plan)


def test_unfused_again_after_sharding_the_separate_projections_are_read(ranks):
    wanted = run(FLUX.build(), FLUX.inputs())
    for got in ranks(2, unfused_afterwards):
        assert all(relative_error(*pair) <= FLOAT32 for pair in zip(got, wanted, strict=True))


def unfused_afterwards(group: Group) -> list[torch.Tensor]:
    model: Any = tp_layers.apply(fused(FLUX), group=group)
    model.unfuse_qkv_projections()
    return run(model, FLUX.inputs())
