"""FLUX.2's blocks by themselves, on two ranks and fused: masks, backends, float16, and how their arguments may come."""

from typing import Any

import pytest
import torch
from diffusers.models import attention_dispatch

import tp_layers
from close import FLOAT32, relative_error
from families import FAMILIES, run
from seeded import noise
from tp_layers.group import Group

FLUX2 = FAMILIES["Flux2Transformer2DModel"]


def overflowing(group: Group | None, dim: int) -> list[torch.Tensor]:
    """What a double and a single block make of float16 that does not fit, of modulations with so many dims."""
    model: Any = FLUX2.build().half()
    if group is not None:
        model = tp_layers.apply(model, group=group, fuse=True)
    double, single = model.transformer_blocks[0], model.single_transformer_blocks[0]
    width = double.norm1.normalized_shape[0]
    x = torch.full((1, 3, width), 6e4, dtype=torch.float16) * noise(1, 3, width).sign().half()
    # Shifts, scales and gates.
    modulation = noise(1, *[1] * (dim - 2), 6 * width, seed=1).half()
    modulation[..., -width:] = 3e4
    with torch.no_grad():
        return [*double(x, x, modulation, modulation), single(x, None, modulation[..., -3 * width :])]


def test_what_does_not_fit_float16_is_clipped_as_diffusers_has_it(ranks):
    for found in (overflowing(None, 2), *ranks(2, overflowing, 2)):
        # diffusers clips no image in a double block.
        text, image, single = (x.abs().max() for x in found)
        assert (text, single) == (65504, 65504) and image.isinf()


def test_modulations_may_have_a_dim_for_the_tokens(ranks):
    for flat, with_tokens in zip(ranks(2, overflowing, 2), ranks(2, overflowing, 3), strict=True):
        assert all(torch.equal(x, y) for x, y in zip(flat, with_tokens, strict=True))


def attended(group: Group | None) -> list[torch.Tensor]:
    """Both kinds of attention, of which a mask leaves every token but one out, and without rotary tables."""
    model: Any = FLUX2.build()
    if group is not None:
        model = tp_layers.apply(model, group=group, fuse=True)
    double, single = model.transformer_blocks[0].attn, model.single_transformer_blocks[0].attn
    x, text = noise(1, 5, double.query_dim), noise(1, 3, double.query_dim, seed=1)
    mask = torch.zeros(1, 1, 8, 8, dtype=torch.bool)
    mask[..., 4] = True
    with torch.no_grad():
        both = double(x, text, attention_mask=mask)
        return [*both, single(x, attention_mask=mask[..., :5, :5]), *double(x, text)]


def test_a_mask_is_taken(ranks):
    wanted = attended(None)
    assert relative_error(wanted[0], wanted[3]) > 0.1
    for found in ranks(2, attended):
        assert all(relative_error(got, full) <= FLOAT32 for got, full in zip(found, wanted, strict=True))


def backends(group: Group) -> list[Any]:
    """Those that double blocks use, one set before the model is sharded, one after."""
    used, original = [], attention_dispatch.dispatch_attention_fn

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        used.append(kwargs["backend"])
        return original(*args, **kwargs)

    model = FLUX2.build()
    # Setting one sets that of the process too.
    with attention_dispatch.attention_backend("native"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_dispatch, "dispatch_attention_fn", counted)
        model.set_attention_backend("_native_math")
        model = tp_layers.apply(model, group=group)
        run(model, FLUX2.inputs())
        model.set_attention_backend("native")
        run(model, FLUX2.inputs())
    return used


def test_an_attention_backend_is_used_whenever_it_is_set(ranks):
    name = attention_dispatch.AttentionBackendName
    assert ranks(2, backends) == [[name._NATIVE_MATH, name.NATIVE]] * 2


def single_block(group: Group | None) -> list[torch.Tensor]:
    """Its outputs: of both streams apart, and put together again."""
    model: Any = FLUX2.build()
    if group is not None:
        model = tp_layers.apply(model, group=group, fuse=True)
    block, width = model.single_transformer_blocks[0], model.inner_dim
    image, text, modulation = noise(1, 5, width), noise(1, 3, width, seed=1), noise(1, 3 * width, seed=2)
    with torch.no_grad():
        return [*block(image, text, modulation, split_hidden_states=True), block(image, text, modulation)]


def test_a_single_block_takes_two_streams_and_gives_two(ranks):
    wanted = single_block(None)
    for found in ranks(2, single_block):
        assert torch.equal(torch.cat(found[:2], 1), found[2])
        assert all(relative_error(got, full) <= FLOAT32 for got, full in zip(found, wanted, strict=True))
