"""Adapters on tiny models of real classes, in real formats, loaded or fused while loading: the full model's output."""

import pytest
import torch

import tp_layers
from close import FLOAT32, compare, relative_error
from families import REGISTERED, digest, run
from lora_formats import FORMATS, made
from loras import draw, fused, keys, write

NAMES = {
    "flux": "FluxTransformer2DModel",
    "flux2": "Flux2Transformer2DModel",
    "wan": "WanTransformer3DModel, image to video",
    "qwenimage": "QwenImageTransformer2DModel",
    "t5": "T5EncoderModel",
}
labels = pytest.mark.parametrize("label", NAMES.values(), ids=NAMES)
ways = pytest.mark.parametrize("way", ["load_adapter", "fused_while_loading"])


def outputs(group, label, heads, files, folder, uneven=False):
    """The output, and a digest of it, with adapters at their scales; fused while loading if there is a folder."""
    family = REGISTERED[label]
    if folder is not None:
        model = tp_layers.load(family.cls, folder, group=group, adapters=files, uneven=uneven)
    else:
        model = tp_layers.apply(family.build(heads), group=group, uneven=uneven)
        for file, scale in files:
            tp_layers.load_adapter(model, file, scale)
    found = run(model, family.inputs())
    return found, digest(found)


def files_for(model, component, folder):
    """Two adapters on every linear layer, of ranks 1 to 16, their files, and the scales."""
    first, second = draw(model, (1, 4, 16)), draw(model, (2,), seed=5)
    files = [
        write(folder / "one.safetensors", keys(first, component)),
        write(folder / "two.safetensors", keys(second, "")),
    ]
    return ((first, 0.5), (second, -0.25)), list(zip(files, (0.5, -0.25), strict=True))


SIZES = {"two_ranks": (2, 4, False), "four_ranks": (4, 4, False), "three_uneven_ranks": (3, 4, True)}


@labels
@ways
@pytest.mark.parametrize(("size", "heads", "uneven"), SIZES.values(), ids=SIZES)
def test_two_adapters_on_every_linear_layer(ranks, tmp_path, label, way, size, heads, uneven):
    family = REGISTERED[label]
    component = "text_encoder_2." if family.config_class else "transformer."
    adapters, files = files_for(family.build(heads), component, tmp_path)
    plain = run(family.build(heads), family.inputs())
    wanted = run(fused(family.build(heads), *adapters), family.inputs())
    assert relative_error(plain[0], wanted[0]) > 0.3
    folder = None
    if way != "load_adapter":
        folder = tmp_path / "model"
        family.build(heads).save_pretrained(folder)
    assert compare(ranks(size, outputs, label, heads, files, folder, uneven), wanted) <= FLOAT32


@ways
@pytest.mark.parametrize("name", ["flux_kohya", "flux2_bfl", "wan_biases", "qwenimage_kohya"])
def test_a_format_of_another_trainer(ranks, tmp_path, name, way):
    model, state, added = made(name)
    label = FORMATS[name][0]
    folder = None
    if way != "load_adapter":
        folder = tmp_path / "model"
        model.save_pretrained(folder)
    plain = run(model, REGISTERED[label].inputs())
    with torch.no_grad():
        for path, delta in added.items():
            parameter = model.get_parameter(path if path.endswith("bias") else f"{path}.weight")
            parameter.copy_(parameter.double() + 0.125 * delta)
    wanted = run(model, REGISTERED[label].inputs())
    assert relative_error(plain[0], wanted[0]) > 0.01
    files = [(write(tmp_path / "lora.safetensors", state), 0.125)]
    assert compare(ranks(2, outputs, label, 4, files, folder), wanted) <= FLOAT32


def halves(group, label, file, folder):
    family = REGISTERED[label]
    model = tp_layers.load(family.cls, folder, group=group, dtype=torch.bfloat16)
    tp_layers.load_adapter(model, file, 0.5)
    return run(model, family.inputs(), torch.bfloat16)[0]


def test_bfloat16_is_at_most_twice_as_far_from_float64_as_one_device_with_the_adapter_fused(ranks, tmp_path):
    family = REGISTERED["FluxTransformer2DModel"]
    lora = draw(family.build(), (4,), only="to_q") | draw(family.build(), (4,), only="proj_out")
    lora = {path: tuple(None if it is None else it.bfloat16() for it in parts) for path, parts in lora.items()}
    one = fused(family.build(dtype=torch.bfloat16), (lora, 0.5))
    exact = fused(torch.nn.Module.to(family.build(dtype=torch.bfloat16), torch.float64), (lora, 0.5))
    inputs = {
        key: it.bfloat16() if isinstance(it, torch.Tensor) and it.is_floating_point() else it
        for key, it in family.inputs().items()
    }
    truth = run(exact, inputs, torch.float64)[0]
    own = relative_error(run(one, inputs, torch.bfloat16)[0], truth)
    assert 0 < own < 0.05
    family.build().save_pretrained(tmp_path / "model")
    file = write(tmp_path / "lora.safetensors", keys(lora))
    for got in ranks(2, halves, family.label, file, tmp_path / "model"):
        assert relative_error(got, truth) <= 2 * own
