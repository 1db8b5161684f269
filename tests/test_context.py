"""diffusers' context parallelism on one axis of a mesh, tensor parallelism on the other: right, or refused.

diffusers counts accelerators to number this rank's device, and divides by that count, which is 0 on CPU ranks.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import ContextParallelConfig
from diffusers.models._modeling_parallel import TensorParallelConfig
from diffusers.models.attention_dispatch import attention_backend
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tp_layers
from close import FLOAT32, relative_error
from families import REGISTERED, digest, run
from families.family import Values, noise, positions
from test_refuse_diffusers import Pipeline
from tp_layers.group import Group

FLUX = "FluxTransformer2DModel"
# Numbers of tokens that two ranks can share.
TEXT = {"encoder_hidden_states": noise(2, 6, 24, seed=2)}
MODELS: dict[str, Values] = {
    FLUX: TEXT | {"txt_ids": positions(6, 3)},
    # Batched ids, as its pipeline makes them; diffusers would leave others whole.
    "Flux2Transformer2DModel": TEXT | {"img_ids": positions(6, 4)[None], "txt_ids": positions(6, 4)[None]},
    "QwenImageTransformer2DModel": TEXT | {"encoder_hidden_states_mask": torch.ones(2, 6, dtype=torch.long)},
    "WanTransformer3DModel, text to video": TEXT,
}


def mesh_of_four() -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("ring", "ulysses", "tp"))


def enable(model: nn.Module, mesh: DeviceMesh | None) -> None:
    with patch("torch.accelerator.device_count", return_value=1):
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))


def both(group: Group, label: str, context_first: bool, folder: str) -> tuple[list[torch.Tensor], int]:
    """The outputs of a model that has both, and their bits; read from a `folder`, if there is one."""
    mesh, family = mesh_of_four(), REGISTERED[label]
    if folder:
        model = tp_layers.load(family.cls, folder, group=mesh["tp"])
    else:
        model = family.build()
        if context_first:
            enable(model, mesh)
        tp_layers.apply(model, group=mesh["tp"])
    if not context_first:
        enable(model, mesh)
    outputs = run(model, family.inputs() | MODELS[label])
    return outputs, digest(outputs)


def check(ranks: Any, label: str, context_first: bool, folder: str = "") -> None:
    (wanted,) = run(REGISTERED[label].build(), REGISTERED[label].inputs() | MODELS[label])
    found = ranks(4, both, label, context_first, folder)
    assert len({bits for _, bits in found}) == 1
    assert relative_error(found[0][0][0], wanted) <= FLOAT32


@pytest.mark.parametrize("context_first", [True, False], ids=["before sharding", "after sharding"])
@pytest.mark.parametrize("label", MODELS)
def test_tokens_and_weights_are_split_on_two_axes(ranks, label, context_first):
    check(ranks, label, context_first)


def test_tokens_of_a_loaded_model_are_split(ranks, tmp_path):
    REGISTERED[FLUX].build().save_pretrained(tmp_path)
    check(ranks, FLUX, False, str(tmp_path))


def said(call: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises((ValueError, RuntimeError)) as error:
        call(*args, **kwargs)
    return str(error.value)


def on_one_axis(_: Group) -> list[str]:
    """What is said where both are to split over the same two ranks; in either order, and with the mesh left out."""
    mesh, build = mesh_of_four(), REGISTERED[FLUX].build
    group = mesh["ulysses"]
    first, later = build(), tp_layers.apply(build(), group=group)
    enable(first, mesh)
    kept = later._parallel_config
    messages = [
        said(tp_layers.apply, first, group=group),
        said(tp_layers.verify, first, {}, group=group),
        said(enable, later, mesh),
        said(enable, later, None),
    ]
    assert type(first.transformer_blocks[0].attn.to_q) is nn.Linear
    assert later._parallel_config is kept and not hasattr(later, "_diffusers_hook")
    return messages


def test_tokens_and_weights_split_over_the_same_ranks_are_refused(ranks):
    for *shared, without in ranks(4, on_one_axis):
        assert all("partial sums of different tokens would be added; make one mesh of both" in it for it in shared)
        assert "context parallelism needs a mesh: make one mesh of both" in without


def with_both(group: Group) -> list[str]:
    """What a model that has both says to more."""
    mesh = mesh_of_four()
    model = tp_layers.apply(REGISTERED[FLUX].build(), group=mesh["tp"])
    enable(model, mesh)
    return [
        said(enable, model, mesh),
        said(model.enable_parallelism, config=TensorParallelConfig()),
        said(Pipeline(model).enable_model_cpu_offload, device="cpu"),
        said(tp_layers.apply, model),
    ]


def test_a_model_with_both_refuses_more(ranks):
    for again, tensor, offload, sharded in ranks(4, with_both):
        assert "Parallelism is already applied" in again and "Parallelism is already applied" in tensor
        assert "is sharded with tensor parallelism, so it cannot" in offload
        assert "it is sharded already" in sharded


def unsuitable(group: Group) -> str:
    """diffusers refuses an attention backend after it has begun; the model is as before."""
    mesh = mesh_of_four()
    model = tp_layers.apply(REGISTERED[FLUX].build(), group=mesh["tp"])
    kept = model._parallel_config
    # A model's backend becomes everybody's, until the end of the context.
    with attention_backend("native"):
        model.set_attention_backend("_native_math")
        message = said(enable, model, mesh)
    assert model._parallel_config is kept
    return message


def test_a_backend_that_cannot_is_refused_by_diffusers(ranks):
    assert all("does not support context parallelism" in message for message in ranks(4, unsuitable))
