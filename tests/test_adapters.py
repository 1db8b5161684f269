"""`load_adapter`, `set_adapters` and `unload_adapter`: what they do to a sharded model, and what they leave alone."""

import copy
import gc
import itertools
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import tp_layers
from close import nearly, randomise, relative_error
from families import FAMILIES, run
from loras import draw, fused, keys, write
from seeded import noise
from small_models import PAIR, Alone, Fused, Pair
from tp_layers import PackedColwiseParallel, PackedRowwiseParallel
from tp_layers.layers.low_rank import AdaptedLinear, adapters_of

FLUX = FAMILIES["FluxTransformer2DModel"]
# Every style of a linear layer, and layers that the plan leaves whole.
MODELS = {
    "colwise_and_rowwise": (Pair, PAIR),
    "packed_with_unequal_blocks": (Fused, {"fused": PackedColwiseParallel(), "out": PackedRowwiseParallel()}),
    "gathered_and_split_input": (Alone, {"linear": "colwise_gather", "reader": "rowwise_split_input"}),
    "gathered_and_whole": (Alone, {"linear": "colwise_gather"}),
}
models = pytest.mark.parametrize("name", MODELS)


def build(name):
    return randomise(MODELS[name][0]())


def outputs(group, name, files, steps):
    """The output after each of the `steps`, which are `set_adapters`' names and scales; None unloads the first."""
    model = tp_layers.apply(build(name), MODELS[name][1], group=group)
    names = [tp_layers.load_adapter(model, file, scale, name=of) for of, (file, scale) in files.items()]
    found = [model(noise(3, 5, 8)).detach()]
    for step in steps:
        if step is None:
            tp_layers.unload_adapter(model, names[0])
        else:
            tp_layers.set_adapters(model, *step)
        found.append(model(noise(3, 5, 8)).detach())
    return found


@models
@pytest.mark.parametrize("size", [2, 4], ids=["two_ranks", "four_ranks"])
def test_several_adapters_are_the_full_model_with_them_fused(ranks, tmp_path, name, size):
    first, second = draw(build(name), (1, 16), bias=True), draw(build(name), (3,), seed=1)
    files = {
        "one": (write(tmp_path / "a.safetensors", keys(first)), 0.5),
        "two": (write(tmp_path / "b.safetensors", keys(second, "")), -1.5),
    }
    steps = [(["two"], [0.25]), ("one",), ([],), (["one", "two"], 2.0), None]
    wanted = [
        fused(build(name), (first, a), (second, b))(noise(3, 5, 8)).detach()
        for a, b in ((0.5, -1.5), (0, 0.25), (1, 0), (0, 0), (2, 2), (0, 2))
    ]
    assert min(relative_error(one, wanted[3]) for one in wanted[:3]) > 0.1
    found = ranks(size, outputs, name, files, steps)
    for of_rank in found:
        for got, first_rank, full in zip(of_rank, found[0], wanted, strict=True):
            assert torch.equal(got, first_rank) and nearly(got, full)


def whole_life(group, file, folder):
    """What of a model an adapter leaves alone, by what is asked."""
    model = tp_layers.apply(build("gathered_and_whole"), MODELS["gathered_and_whole"][1], group=group)
    state = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    plain, x, hooks = model(noise(2, 8)), noise(2, 8), list(model._forward_pre_hooks)
    text, tensors = repr(tp_layers.describe(model, size=1)) if group.size == 1 else "", len(list(model.buffers()))
    name = tp_layers.load_adapter(model, file)
    tp_layers.save(model, folder)
    after = model.state_dict()
    layer = adapters_of(model)[name][0]
    freed = weakref.ref(layer.down)
    found = {
        "keys": list(after) == list(state) and all(torch.equal(after[key], state[key]) for key in state),
        "buffers": len(list(model.buffers())) == tensors,
        "saved": _saved(folder, state, group),
        "moved": not torch.equal(model(x), plain),
        "whole": isinstance(model.reader, AdaptedLinear) and isinstance(model.reader, nn.Linear),
        "described": text == (repr(tp_layers.describe(model, size=1)) if group.size == 1 else ""),
        "frozen": not layer.down.requires_grad,
    }
    tp_layers.unload_adapter(model, name)
    del layer
    gc.collect()
    found |= {
        "freed": freed() is None,
        "back": torch.equal(model(x), model(x)) and type(model.reader) is nn.Linear and adapters_of(model) == {},
        "same": torch.equal(model(noise(2, 8)), plain) and list(model._forward_pre_hooks) == hooks,
    }
    return found


def _saved(folder, state, group):
    if group.rank:
        return True
    from safetensors.torch import load_file

    saved = load_file(Path(folder) / "model.safetensors")
    full = build("gathered_and_whole").state_dict()
    return saved.keys() == full.keys() and all(torch.equal(saved[key], full[key]) for key in full)


@pytest.mark.parametrize("size", [1, 2], ids=["one_rank", "two_ranks"])
def test_weights_state_dict_and_saved_files_are_those_without_adapters(ranks, tmp_path, size):
    file = write(tmp_path / "a.safetensors", keys(draw(build("gathered_and_whole"))))
    for found in ranks(size, whole_life, file, str(tmp_path / "saved")):
        assert found == dict.fromkeys(found, True)


def reloaded(group, first, second, file):
    model = tp_layers.load(FLUX.cls, first, group=group)
    tp_layers.load_adapter(model, file)
    return run(tp_layers.reload(model, second), FLUX.inputs())


def test_adapters_stand_beside_the_weights_of_another_checkpoint(ranks, tmp_path):
    FLUX.build().save_pretrained(tmp_path / "first")
    other = randomise(FLUX.build(), seed=7)
    other.save_pretrained(tmp_path / "second")
    lora = draw(other)
    wanted = run(fused(other, (lora, 1.0)), FLUX.inputs())
    file = write(tmp_path / "a.safetensors", keys(lora))
    for got in ranks(2, reloaded, tmp_path / "first", tmp_path / "second", file):
        assert all(nearly(one, full) for one, full in zip(got, wanted, strict=True))


def moved(group, file):
    model = tp_layers.apply(build("colwise_and_rowwise"), PAIR, group=group)
    tp_layers.load_adapter(model, file)
    twin = copy.deepcopy(model).double()
    return model(noise(3, 8)).detach(), twin(noise(3, 8).double()).detach()


def test_a_copy_in_another_dtype_takes_its_adapters_along(ranks, tmp_path):
    lora = draw(Pair())
    file = write(tmp_path / "a.safetensors", keys(lora))
    full = fused(build("colwise_and_rowwise").double(), (lora, 1.0))
    for first, second in ranks(2, moved, file):
        wanted = full(noise(3, 8).double()).detach()
        assert nearly(first, wanted) and second.dtype == torch.float64 and relative_error(second, wanted) < 1e-12


def gradients(group, name, file):
    model = tp_layers.apply(build(name), MODELS[name][1], group=group)
    tp_layers.load_adapter(model, file)
    x = noise(3, 5, 8).requires_grad_()
    model(x).backward(noise(3, 5, 4, seed=1))
    return x.grad, {
        key: it.grad
        for key, it in model.named_parameters()
        if it.shape == dict(build(name).named_parameters())[key].shape
    }


@models
def test_gradients_go_through_the_adapters(ranks, tmp_path, name):
    lora = draw(build(name), (2,))
    full, x = fused(build(name), (lora, 1.0)), noise(3, 5, 8).requires_grad_()
    full(x).backward(noise(3, 5, 4, seed=1))
    for grad, whole in ranks(2, gradients, name, write(tmp_path / "a.safetensors", keys(lora))):
        assert nearly(grad, x.grad)
        for key, found in whole.items():
            assert nearly(found, full.get_parameter(key).grad), key


def compiled(group, name, file):
    torch._dynamo.reset()
    model = tp_layers.apply(build(name), MODELS[name][1], group=group).requires_grad_(False)
    tp_layers.load_adapter(model, file, 0.5, name="a")
    call = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = [(call(noise(3, 8)), model(noise(3, 8)))]
    for scale in (2.0, -0.75):
        tp_layers.set_adapters(call, "a", scale)
        found.append((call(noise(3, 8)), model(noise(3, 8))))
    tp_layers.unload_adapter(call, "a")
    return [*found, (call(noise(3, 8)), model(noise(3, 8)))]


@pytest.mark.parametrize("name", ["colwise_and_rowwise", "gathered_and_whole"])
def test_a_compiled_model_has_its_adapters_in_one_graph(ranks, tmp_path, name):
    file = write(tmp_path / "a.safetensors", keys(draw(build(name), bias=True)))
    for found in ranks(2, compiled, name, file):
        assert all(nearly(graph, eager) for graph, eager in found)
        assert all(relative_error(a, b) > 0.1 for (a, _), (b, _) in itertools.pairwise(found))
