"""Files of adapters, in every format and with every way to say their scale, read as what they add to the weights."""

import pytest
import torch

from close import relative_error
from lora_formats import FORMATS, made
from loras import write
from tp_layers.loader.adapter_file import read_adapter


def added(layers):
    """What the layers of an adapter add, by layer; to a bias under the bias's name."""
    found = {}
    for path, it in layers.items():
        found[path] = it.factor * it.up.double() @ it.down.double()
        if it.bias is not None:
            found[f"{path}.bias"] = it.factor * it.bias.double()
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_a_format_is_read_as_what_it_adds_to_the_weights(tmp_path, name):
    model, state, wanted = made(name)
    found = added(read_adapter(model, write(tmp_path / "lora.safetensors", state)).layers)
    assert found.keys() == wanted.keys()
    for path, delta in wanted.items():
        assert relative_error(found[path], delta) < 1e-6, path


def test_half_precision_is_scaled_by_its_alpha_without_a_rounding(tmp_path):
    model, state, _ = made("flux_kohya")
    half = {key: tensor.half() for key, tensor in state.items()}
    found = added(read_adapter(model, write(tmp_path / "lora.safetensors", half)).layers)
    name = "lora_unet_double_blocks_0_img_mlp_0"
    factor = float(half[f"{name}.alpha"]) / 4
    exact = factor * half[f"{name}.lora_up.weight"].double() @ half[f"{name}.lora_down.weight"].double()
    assert relative_error(found["transformer_blocks.0.ff.net.0.proj"], exact) < 1e-7


# What diffusers' converters leave out: a format, and what its file has beside.
LEFT_OUT = {
    "alpha_of_the_last_layer": (
        "flux_kohya",
        {
            "lora_unet_final_layer_linear.lora_down.weight": (4, 64),
            "lora_unet_final_layer_linear.lora_up.weight": (8, 4),
            "lora_unet_final_layer_linear.alpha": (),
        },
        "FluxLoraLoaderMixin drops 'lora_unet_final_layer_linear.alpha'",
    ),
    "difference_of_a_norm": (
        "flux_kohya",
        {"diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff": (16,)},
        "drops 'diffusion_model.double_blocks.0.img_attn.norm.query_norm.diff'",
    ),
    "difference_of_a_bias": (
        "flux_kohya",
        {"lora_unet_double_blocks_0_img_attn_proj.diff_b": (64,)},
        "drops 'lora_unet_double_blocks_0_img_attn_proj.diff_b'",
    ),
    "difference_of_another_norm": (
        "wan",
        {"diffusion_model.blocks.0.norm3.diff": (48,)},
        "WanLoraLoaderMixin drops 'diffusion_model.blocks.0.norm3.diff'",
    ),
}


@pytest.mark.parametrize(("name", "beside", "message"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_a_converter_would_leave_out_is_refused(tmp_path, name, beside, message):
    model, state, _ = made(name)
    state |= {key: torch.full(shape, 3.0) for key, shape in beside.items()}
    with pytest.raises(ValueError, match=message):
        read_adapter(model, write(tmp_path / "lora.safetensors", state))


def test_differences_of_zero_may_be_left_out(tmp_path):
    model, state, wanted = made("wan")
    state["diffusion_model.blocks.0.norm3.diff"] = torch.zeros(48)
    assert added(read_adapter(model, write(tmp_path / "lora.safetensors", state)).layers).keys() == wanted.keys()


def test_an_alpha_that_is_the_rank_may_be_left_out(tmp_path):
    model, state, _ = made("flux_kohya")
    state |= {key: torch.full(shape, 4.0) for key, shape in LEFT_OUT["alpha_of_the_last_layer"][1].items()}
    found = added(read_adapter(model, write(tmp_path / "lora.safetensors", state)).layers)
    assert torch.equal(found["proj_out"], torch.full((8, 64), 64.0).double())


def test_keys_that_no_converter_knows_are_refused_with_its_words(tmp_path):
    model, state, _ = made("flux2_bfl")
    state["diffusion_model.double_blocks.0.img_attn.extra.lora_A.weight"] = torch.zeros(2, 3)
    with pytest.raises(ValueError, match=r"Flux2LoraLoaderMixin cannot convert its keys .*img_attn\.extra"):
        read_adapter(model, write(tmp_path / "lora.safetensors", state))
