"""`load(..., adapters=[(path, scale)])`: the adapters are in the shards, rounded once, and in what is saved."""

from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import tp_layers
from close import nearly, randomise, relative_error
from families import FAMILIES, run
from loras import draw, fused, keys, write
from toy import PLAN, Toy, save_toy
from tp_layers.group import Group
from tp_layers.layers.low_rank import adapters_of
from tp_layers.loader import fuse_adapters

FLUX = FAMILIES["FluxTransformer2DModel"]
ONE = Group()


def weights(group, folder, files, how, saved):
    """Loaded with adapters and saved; whether the checkpoint's files are what they were, and the report's bytes."""
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    # Several pieces even of these weights.
    with patch.object(fuse_adapters, "PIECE_BYTES", 1 << 10):
        model, report = tp_layers.load(FLUX.cls, folder, group=group, adapters=files, report=True, **how)
    _, plain = tp_layers.load(FLUX.cls, folder, group=group, report=True, **how)
    tp_layers.save(model, saved)
    same = (report.bytes_held, report.bytes_read) == (plain.bytes_held, plain.bytes_read) and adapters_of(model) == {}
    return same and before == {file.name: file.read_bytes() for file in folder.iterdir()}


HOW = {
    "float32": ({}, torch.float32),
    "mapped": ({"mmap": True}, torch.float32),
    "bfloat16": ({"dtype": torch.bfloat16}, torch.bfloat16),
}


@pytest.mark.parametrize(("how", "dtype"), HOW.values(), ids=HOW)
@pytest.mark.parametrize("size", [1, 2, 4], ids=["one_rank", "two_ranks", "four_ranks"])
def test_what_is_saved_has_the_adapters_in_its_weights(ranks, tmp_path, how, dtype, size):
    FLUX.build().save_pretrained(tmp_path / "model")
    first, second = draw(FLUX.build(), (1, 16), bias=True), draw(FLUX.build(), (3,), seed=1)
    files = [
        (write(tmp_path / "a.safetensors", keys(first)), 0.5),
        (write(tmp_path / "b.safetensors", keys(second)), -1.5),
    ]
    assert all(ranks(size, weights, tmp_path / "model", files, how, tmp_path / "saved"))
    exact = fused(FLUX.build(dtype=dtype).double(), (first, 0.5), (second, -1.5)).state_dict()
    saved = load_file(tmp_path / "saved" / "diffusion_pytorch_model.safetensors")
    assert saved.keys() == exact.keys()
    for key, tensor in saved.items():
        # Rounded once: as near as the dtype can be, but for float32's own error before.
        least = relative_error(exact[key].to(dtype), exact[key])
        assert tensor.dtype == dtype and relative_error(tensor, exact[key]) <= 1e-6 + least


def test_a_reload_replaces_the_fused_weights(tmp_path):
    FLUX.build().save_pretrained(tmp_path)
    file = write(tmp_path / "loras" / "a.safetensors", keys(draw(FLUX.build())))
    model = tp_layers.load(FLUX.cls, tmp_path, group=ONE, adapters=[(file, 1.0)])
    wanted = run(FLUX.build(), FLUX.inputs())[0]
    assert not nearly(run(model, FLUX.inputs())[0], wanted)
    assert torch.equal(run(tp_layers.reload(model, tmp_path), FLUX.inputs())[0], wanted)


def test_no_more_than_a_piece_of_a_weight_is_held_in_float32(tmp_path, monkeypatch):
    FLUX.build().save_pretrained(tmp_path)
    file = write(tmp_path / "loras" / "a.safetensors", keys(draw(FLUX.build())))
    monkeypatch.setattr(fuse_adapters, "PIECE_BYTES", 1 << 10)
    largest, plain = [], torch.Tensor.addmm_

    def noted(self, *args, **kwargs):
        largest.append(self.numel() * 4)
        return plain(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "addmm_", noted)
    tp_layers.load(FLUX.cls, tmp_path, group=ONE, adapters=[(file, 1.0)])
    widest = max(it.in_features for it in FLUX.build().modules() if isinstance(it, nn.Linear))
    assert 0 < max(largest) <= max(1 << 10, 4 * widest) and len(largest) > 50


REFUSED = {
    "a_path_alone": (lambda file: file, r"a list of \(path, scale\)"),
    "paths_alone": (lambda file: [file], r"a list of \(path, scale\), got .* in it"),
    "a_scale_that_is_none": (lambda file: [(file, None)], "finite number"),
    "of_a_tied_weight": (
        lambda file: [(file, 1.0)], r"'embed' is tied to \['head.weight'\], .* use tp_layers.load_adapter"
    ),
    "of_another_model": (
        lambda file: [(file.replace("a.safe", "b.safe"), 1.0)], "1 of its 1 layers are none of this Toy's: 'other'"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("adapters", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_fused_is_refused_before_a_byte_is_read(tmp_path, monkeypatch, adapters, message):
    (tmp_path / "model").mkdir()
    save_toy(tmp_path / "model", torch.float32)
    file = write(tmp_path / "a.safetensors", keys(draw(Toy(), only="embed")))
    other = {"other.lora_A.weight": torch.ones(1, 6), "other.lora_B.weight": torch.ones(8, 1)}
    write(tmp_path / "b.safetensors", other)
    monkeypatch.setattr("tp_layers.loader.load.fill", None)
    with pytest.raises(ValueError, match=message):
        tp_layers.load(Toy, tmp_path / "model", plan=PLAN, group=ONE, adapters=adapters(file))


def differing(group, folder, files):
    try:
        tp_layers.load(FLUX.cls, folder, group=group, adapters=[(files[group.rank], 1.0)])
    except ValueError as error:
        return str(error)
    return "loaded"


def test_ranks_that_see_other_files_refuse(ranks, tmp_path):
    FLUX.build().save_pretrained(tmp_path / "model")
    files = [write(tmp_path / f"{seed}.safetensors", keys(draw(FLUX.build(), seed=seed))) for seed in (0, 1)]
    for told in ranks(2, differing, tmp_path / "model", files):
        assert "has another model, checkpoint" in told


def test_an_adapter_of_a_tied_layer_may_stand_beside_it(tmp_path):
    model = tp_layers.apply(randomise(Toy()), PLAN, group=ONE)
    lora = draw(Toy(), only="embed")
    wanted = model.embed(torch.ones(6)) + lora["embed"][1] @ lora["embed"][0] @ torch.ones(6)
    head = model.head(torch.ones(6))
    tp_layers.load_adapter(model, write(tmp_path / "a.safetensors", keys(lora)))
    assert nearly(model.embed(torch.ones(6)).detach(), wanted.detach()) and torch.equal(model.head(torch.ones(6)), head)
