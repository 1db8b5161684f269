"""`apply` for real pipelines: the picture of two ranks is that of one, whatever its components."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPTextModel, T5EncoderModel

import tp_layers
from tiny_pipelines import flux2
from tiny_pipelines.image import IMAGE
from tiny_pipelines.parts import seeded
from tiny_pipelines.video import VIDEO
from tp_layers.group import Group
from tp_layers.loader.components import modules_of, settle, why_whole
from tp_layers.plans.shard import sharding_of

PIPELINES = {**IMAGE, **VIDEO, "Flux2": (flux2.build, dict(height=16, width=24, max_sequence_length=16))}
SHARDED = {
    "Flux": ["text_encoder_2", "transformer"],
    "Flux2": ["text_encoder", "transformer"],
    "QwenImage": ["text_encoder", "transformer"],
    "StableDiffusion3": ["text_encoder_3", "transformer"],
    "Wan": ["text_encoder", "transformer"],
    "Wan 2.2": ["text_encoder", "transformer", "transformer_2"],
    "LTX": ["text_encoder", "transformer"],
    "HunyuanVideo": ["text_encoder", "transformer"],
    "CogVideoX": ["text_encoder", "transformer"],
}


def build(name: str) -> Any:
    pipeline = PIPELINES[name][0]()
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def picture(pipeline: Any, name: str) -> np.ndarray:
    """Numbers from 0 to 1, after three steps."""
    arguments = dict(num_inference_steps=3, generator=seeded(), output_type="np", return_dict=False)
    return np.asarray(pipeline(prompt="a lighthouse", **arguments, **PIPELINES[name][1])[0])


def sharded_picture(group: Group, name: str, fuse: bool | None = None) -> tuple[np.ndarray, list[str], dict[str, int]]:
    """The picture, the sharded components, and how often each of them was called."""
    pipeline, calls = build(name), {}
    report = tp_layers.apply(pipeline, group=group, fuse=fuse)
    for part in report.sharded:
        count = calls.setdefault(part, [])
        getattr(pipeline, part).register_forward_hook(lambda *_, count=count: count.append(1))
    drawn = picture(pipeline, name)
    return drawn, sorted(report.sharded), {part: len(count) for part, count in calls.items()}


@pytest.mark.parametrize("fuse", [None, True], ids=["plain", "fused"])
@pytest.mark.parametrize("name", PIPELINES)
def test_two_ranks_draw_the_picture_of_one(ranks, name, fuse):
    wanted, results = picture(build(name), name), ranks(2, sharded_picture, name, fuse)
    assert np.ptp(wanted) > 0.3
    for drawn, sharded, calls in results:
        assert np.array_equal(drawn, results[0][0])
        assert np.abs(drawn - wanted).max() <= 1 / 255
        assert sharded == SHARDED[name] and all(calls.values())


def what_a_rank_holds(group: Group) -> list[tuple[str, bool, bool]]:
    """Of each component its name, whether it is said to be sharded, and whether what is said of bytes is true."""
    pipeline = build("Flux")
    full = {name: size(model) for name, model in pipeline.components.items() if isinstance(model, torch.nn.Module)}
    report = tp_layers.apply(pipeline, group=group)
    assert f"rank {group.rank} of 2" in str(report) and "whole: no plan for CLIPTextModel" in str(report)
    assert report.full_bytes == sum(full.values())
    return [
        (
            part.name,
            part.sharded,
            (part.full_bytes, part.held_bytes) == (full[part.name], size(getattr(pipeline, part.name))),
        )
        for part in report.components
    ]


def size(model: torch.nn.Module) -> int:
    """Bytes of the parameters and persistent buffers, tied ones once."""
    tensors = {id(tensor): tensor for tensor in model.state_dict(keep_vars=True).values()}
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())


def test_the_report_says_what_a_rank_holds(ranks):
    for parts in ranks(2, what_a_rank_holds):
        assert sorted(parts) == [
            ("text_encoder", False, True),
            ("text_encoder_2", True, True),
            ("transformer", True, True),
            ("vae", False, True),
        ]


def test_components_choose():
    pipeline = build("Flux")
    report = tp_layers.apply(pipeline, group=Group(), components=["transformer"])
    assert report.sharded == ["transformer"] and "not among components=" in str(report)
    assert tp_layers.apply(pipeline, group=Group()).sharded == ["text_encoder_2", "transformer"]


def test_a_component_that_is_sharded_already_stays_as_it_is():
    pipeline = build("Flux")
    tp_layers.apply(pipeline.transformer, group=Group())
    layer = pipeline.transformer.transformer_blocks[0].attn.to_q
    assert "transformer" in tp_layers.apply(pipeline, group=Group()).sharded
    assert pipeline.transformer.transformer_blocks[0].attn.to_q is layer
    with pytest.raises(ValueError, match="is sharded over another group"):
        tp_layers.apply(pipeline, group=Group(0, 2))


WRONG = {
    "an unknown component": (dict(components=["unet"]), "no model called 'unet'; its models are"),
    "a string for a list": (dict(components="transformer"), r"such as \['transformer'\]"),
    "a component without a plan": (dict(components=["vae"]), "component 'vae': no plan for AutoencoderKL"),
    "a plan of no component": (dict(plan={"unet": {}}), "no model called 'unet'"),
    "one plan for all": (dict(plan={"transformer": "colwise"}), "'transformer' has 'colwise'"),
    "a plan that is not used": (dict(plan={"transformer": {}}, components=["vae"]), "has a plan, but is not among"),
    "a plan that does not fit": (
        dict(plan={"transformer": {"blocks": "colwise"}}),
        "component 'transformer': .*blocks",
    ),
    "a size that does not fit": (dict(group=Group(0, 3)), "component 'transformer': .*sizes that work"),
}


@pytest.mark.parametrize(("options", "message"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_said_before_anything_is_touched(options, message):
    pipeline = build("Flux")
    before = {name: id(value) for name, value in pipeline.transformer.state_dict(keep_vars=True).items()}
    with pytest.raises(ValueError, match=message):
        tp_layers.apply(pipeline, **{"group": Group(), **options})
    parts = pipeline.components.values()
    assert not any(sharding_of(part) for part in parts if isinstance(part, torch.nn.Module))
    assert {name: id(value) for name, value in pipeline.transformer.state_dict(keep_vars=True).items()} == before
    assert "to" not in vars(pipeline)


def build_hooked() -> Any:
    """A pipeline whose T5 cannot be sharded."""
    pipeline = build("Flux")
    pipeline.text_encoder_2.encoder.block[0].layer[1].DenseReluDense.wo.register_forward_hook(print)
    return pipeline


def test_a_model_under_two_names_is_sharded_once():
    pipeline = build("Wan 2.2")
    pipeline.transformer_2 = pipeline.transformer
    report = tp_layers.apply(pipeline, group=Group())
    assert sorted(report.sharded) == ["text_encoder", "transformer"]
    assert sharding_of(pipeline.transformer_2) is not None and "to" in vars(pipeline)


@pytest.mark.parametrize(
    "option", [dict(overlap=-3), dict(backend="none"), dict(reduce_dtype=torch.int8), dict(fuse=2)]
)
def test_an_option_that_is_wrong_is_no_reason_to_leave_a_component_whole(option):
    pipeline = build("Flux")
    pipeline.transformer = None
    with pytest.raises(ValueError, match=r"overlap must be|is 'none'|reduce_dtype must|fuse must"):
        tp_layers.apply(pipeline, group=Group(), **option)


def test_another_pipeline_that_takes_the_models_over_does_not_move_them():
    pipeline = build("Flux")
    tp_layers.apply(pipeline, group=Group())
    other = type(pipeline).from_pipe(pipeline)
    with pytest.raises(ValueError, match="belongs on cpu, not on meta"):
        other.to("meta")
    assert pipeline.transformer.to(torch.ones(1)) is pipeline.transformer
    assert pipeline.transformer.to("cpu", torch.bfloat16, True).dtype == torch.bfloat16


def test_a_text_encoder_that_does_not_fit_stays_whole_with_a_warning(caplog):
    report = tp_layers.apply(build_hooked(), group=Group())
    assert report.sharded == ["transformer"]
    assert "'text_encoder_2' stays whole on every rank" in caplog.text and "has hooks" in str(report)
    with pytest.raises(ValueError, match=r"component 'text_encoder_2': .*has hooks"):
        tp_layers.apply(build_hooked(), group=Group(), components=["text_encoder_2"])


@pytest.mark.parametrize(("cls", "warned"), [(T5EncoderModel, True), (CLIPTextModel, False)])
def test_a_checkpoint_that_is_refused_is_warned_of_if_there_is_a_plan(cls, warned, caplog):
    assert why_whole("text_encoder", cls, ValueError("an extra tensor")) == "an extra tensor"
    assert ("'text_encoder' stays whole on every rank: an extra tensor" in caplog.text) is warned


def test_components_is_for_pipelines():
    with pytest.raises(ValueError, match="components= is for pipelines, this is a FluxTransformer2DModel"):
        tp_layers.apply(build("Flux").transformer, components=["transformer"], group=Group())


def test_to_takes_the_ranks_own_device_alone():
    pipeline = build("Flux")
    tp_layers.apply(pipeline, group=Group())
    assert pipeline.to("cpu") is pipeline and pipeline.to(torch.device("cpu"), torch.float32) is pipeline
    assert pipeline.to(torch.bfloat16).transformer.dtype == torch.bfloat16
    for device in ("meta", torch.device("meta")):
        with pytest.raises(ValueError, match="this rank's part of it belongs on cpu, not on meta"):
            pipeline.to(device)
    with pytest.raises(ValueError, match="belongs on cpu"):
        pipeline.to(device="meta")
    copied = copy.deepcopy(pipeline)
    assert copied.to("cpu") is copied


def test_every_component_is_moved_to_the_ranks_device():
    pipeline = build("Flux")
    settle(pipeline, torch.device("meta"))
    assert {tensor.device.type for part in modules_of(pipeline).values() for tensor in part.parameters()} == {"meta"}


@pytest.mark.parametrize(
    "method", ["save_pretrained", "enable_model_cpu_offload", "enable_sequential_cpu_offload", "enable_group_offload",
               "load_lora_weights"],
)  # fmt: skip
def test_a_sharded_pipeline_refuses(method, tmp_path):
    pipeline = build("Flux")
    tp_layers.apply(pipeline, group=Group())
    with pytest.raises(NotImplementedError, match="this pipeline is sharded by tp_layers, so it cannot"):
        getattr(pipeline, method)(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_an_offloaded_pipeline_is_refused():
    pipeline = build("Flux")
    pipeline.vae._hf_hook = object()
    with pytest.raises(ValueError, match="accelerate offloads 'vae'"):
        tp_layers.apply(pipeline, group=Group())
