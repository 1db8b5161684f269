"""`load` of a pipeline's folder: each rank reads its own part, and the picture is that of one rank."""

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import tp_layers
from test_pipelines import PIPELINES, SHARDED, build, picture, size
from tp_layers.group import Group
from tp_layers.loader import load as loading
from tp_layers.plans.shard import sharding_of

ONE_OF_EACH = ["Flux", "Flux2", "QwenImage", "Wan 2.2"]


def loaded_picture(group: Group, name: str, folder: str) -> tuple[np.ndarray, list[str], list[str]]:
    """The picture, the sharded components, and the folders that `from_pretrained` was left to read."""
    pipeline_class, read = type(build(name)), []
    original = diffusers.ModelMixin.from_pretrained.__func__
    with pytest.MonkeyPatch.context() as patch:
        spy = classmethod(lambda cls, *args, **how: (read.append(cls.__name__), original(cls, *args, **how))[1])
        patch.setattr(diffusers.ModelMixin, "from_pretrained", spy)
        pipeline, report = tp_layers.load(pipeline_class, folder, group=group, report=True)
    pipeline.set_progress_bar_config(disable=True)
    assert report.held_bytes == sum(part.held_bytes for part in report.components)
    assert all(size(getattr(pipeline, part.name)) == part.held_bytes for part in report.components)
    return picture(pipeline, name), sorted(report.sharded), read


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_two_ranks_draw_the_picture_of_one_from_a_folder(ranks, tmp_path, name):
    pipeline = build(name)
    pipeline.save_pretrained(tmp_path)
    wanted = picture(pipeline, name)
    for drawn, sharded, read in ranks(2, loaded_picture, name, str(tmp_path)):
        assert np.abs(drawn - wanted).max() <= 1 / 255
        assert sharded == SHARDED[name]
        # diffusers reads what is whole alone.
        assert read == [type(pipeline.vae).__name__]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """FLUX.1 in bfloat16."""
    pipeline = build("Flux")
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            torch.nn.Module.to(part, torch.bfloat16)
    pipeline.save_pretrained(tmp_path)
    return tmp_path


def dtypes(pipeline: Any) -> dict[str, torch.dtype]:
    return {name: part.dtype for name, part in pipeline.components.items() if isinstance(part, torch.nn.Module)}


def load(path: Path, **options: Any) -> Any:
    return tp_layers.load(diffusers.FluxPipeline, path, **{"group": Group(), **options})


def test_every_component_has_the_dtype_that_was_asked_for_or_stored(folder):
    half, full = torch.bfloat16, torch.float32
    assert set(dtypes(load(folder)).values()) == {half}
    assert set(dtypes(load(folder, dtype=full)).values()) == {full}
    chosen = dtypes(load(folder, dtype={"transformer": full, "default": torch.float16}))
    assert chosen.pop("transformer") == full and set(chosen.values()) == {torch.float16}
    chosen = dtypes(load(folder, dtype={"vae": full}))
    assert chosen.pop("vae") == full and set(chosen.values()) == {half}


def test_the_general_class_finds_the_pipelines_own(folder):
    assert type(tp_layers.load(diffusers.DiffusionPipeline, folder, group=Group())) is diffusers.FluxPipeline


def test_components_that_are_there_are_taken(folder):
    vae = build("Flux").vae
    transformer = tp_layers.load(diffusers.FluxTransformer2DModel, folder, subfolder="transformer", group=Group())
    pipeline, report = load(
        folder, vae=vae, transformer=transformer, text_encoder_2=None, tokenizer_2=None, report=True
    )
    assert pipeline.vae is vae and pipeline.transformer is transformer and pipeline.text_encoder_2 is None
    assert report.sharded == ["transformer"]


def test_a_transformer_that_is_given_whole_is_told(folder, caplog):
    _, report = load(folder, transformer=build("Flux").transformer, report=True)
    assert "'transformer' was given whole" in caplog.text and "whole: given as it is" in str(report)
    sharded = tp_layers.apply(build("Flux").transformer, group=Group(0, 2))
    sharded.__dict__["_tp_layers"].group.__dict__["process_group"] = "another"
    with pytest.raises(ValueError, match="'transformer' is sharded over another group"):
        load(folder, transformer=sharded)


def test_components_choose(folder):
    pipeline, report = load(folder, components=["text_encoder_2"], report=True)
    assert report.sharded == ["text_encoder_2"] and sharding_of(pipeline.transformer) is None
    assert "transformer" in str(report) and "not among components=" in str(report)


def test_a_variant_is_read_for_every_component(folder):
    load(folder).vae.save_pretrained(folder / "vae", variant="fp16")
    for name in ("text_encoder", "text_encoder_2", "transformer"):
        (file,) = (folder / name).glob("*.safetensors")
        file.rename(file.with_suffix(".fp16.safetensors"))
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    assert sorted(load(folder, variant="fp16", report=True)[1].sharded) == ["text_encoder_2", "transformer"]


WRONG = {
    "an unknown component": (dict(components=["unet"]), ValueError, "no model called 'unet'"),
    "a plan that does not fit": (dict(plan={"transformer": {"x": "colwise"}}), ValueError, "component 'transformer'"),
    "a component without a plan": (dict(components=["vae"]), ValueError, "component 'vae': no plan for AutoencoderKL"),
    "a size that does not fit": (dict(group=Group(0, 3)), ValueError, "component 'transformer': .*sizes that work"),
    "a subfolder": (dict(subfolder="transformer"), ValueError, "subfolder= is for one component"),
    "an unknown argument": (dict(unet=None), TypeError, "unexpected argument 'unet'"),
    "a device map": (dict(device_map="balanced"), ValueError, "device_map='balanced' cannot be combined"),
    "the old name of dtype": (dict(torch_dtype=torch.float16), TypeError, "use dtype="),
}


@pytest.mark.parametrize(("options", "kind", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_before_anything_is_read(folder, monkeypatch, options, kind, message):
    monkeypatch.setattr(loading, "fill", lambda *args: pytest.fail("read"))
    with pytest.raises(kind, match=message):
        load(folder, **options)


def test_components_is_for_pipelines(folder):
    with pytest.raises(ValueError, match="components= is for pipelines"):
        tp_layers.load(diffusers.FluxTransformer2DModel, folder / "transformer", components=["transformer"])


def test_a_broken_transformer_is_an_error(folder):
    file = folder / "transformer" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    tensors.pop("proj_out.weight")
    save_file(tensors, file)
    with pytest.raises(ValueError, match=r"component 'transformer': .*proj_out.weight"):
        load(folder)


def test_a_pipeline_without_an_index_is_an_error(folder):
    (folder / "model_index.json").unlink()
    with pytest.raises(OSError, match=r"model_index\.json"):
        load(folder)


def unlike(group: Group, folder: str) -> str:
    """The error of a load whose ranks see other checkpoints."""
    path = Path(folder) / str(group.rank)
    try:
        tp_layers.load(diffusers.FluxPipeline, path, group=group)
    except (ValueError, OSError) as error:
        return str(error)
    return ""


def test_ranks_that_see_other_pipelines_are_refused(ranks, tmp_path):
    for rank in (0, 1):
        build("Flux").save_pretrained(tmp_path / str(rank))
    index = tmp_path / "1" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), "text_encoder_2": [None, None]}))
    for message in ranks(2, unlike, str(tmp_path)):
        assert "has another model, checkpoint, plan or size" in message


def test_every_pipeline_of_the_test_can_be_saved_and_loaded(tmp_path):
    """Without ranks, which the test above has for some."""
    for name in PIPELINES.keys() - set(ONE_OF_EACH):
        pipeline = build(name)
        pipeline.save_pretrained(tmp_path / name)
        loaded, report = tp_layers.load(type(pipeline), tmp_path / name, group=Group(), report=True)
        loaded.set_progress_bar_config(disable=True)
        assert sorted(report.sharded) == SHARDED[name]
        assert np.array_equal(picture(loaded, name), picture(pipeline, name))
