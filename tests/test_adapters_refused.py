"""What adapters on a sharded model refuse, before anything is touched, and which keys they skip."""

import inspect

import pytest
import torch
from torch import nn

import tp_layers
from close import randomise
from families import FAMILIES, REGISTERED, run
from loras import draw, keys, write
from refused import refused
from small_models import PAIR, Pair
from tp_layers.group import Group
from tp_layers.layers.low_rank import adapters_of

ONE = Group()


class Mixed(Pair):
    """With layers that can have no adapter, and attention whose projections are fused."""

    def __init__(self):
        super().__init__()
        self.conv, self.table, self.norm = nn.Conv1d(8, 8, 1), nn.Embedding(4, 8), nn.LayerNorm(8)
        self.attn = nn.MultiheadAttention(8, 2)
        self.own = nn.Module()
        self.own.to_q, self.own.to_qkv, self.own.fused_projections = nn.Linear(8, 8), nn.Linear(8, 24), True
        self.one = nn.Linear(8, 12)
        self.same = self.one


def pair_of(path, n=12, k=8, r=2):
    return {f"{path}.lora_A.weight": torch.ones(r, k), f"{path}.lora_B.weight": torch.ones(n, r)}


UP = pair_of("up")
REFUSED = {
    "nothing": ({}, "it has nothing for a Mixed"),
    "unknown": (UP | pair_of("missing.to_q"), "1 of its 2 layers are none of this Mixed's: 'missing.to_q'"),
    "unknown_beside_others": (pair_of("own.to_v"), "'own.to_v' ('own' has to_q, to_qkv)"),
    "fused": (UP | pair_of("own.to_q", 8), "'own.to_q' is not read, as the projections are fused in 'own.to_qkv'"),
    "convolution": (UP | pair_of("conv", 8), "'conv' is a Conv1d: only linear layers"),
    "embedding": (UP | pair_of("table", 8), "'table' is a Embedding: only linear layers"),
    "norm": (UP | pair_of("norm", 8), "'norm' is a LayerNorm"),
    "read_elsewhere": (UP | pair_of("attn.out_proj", 8), "'attn.out_proj' is a NonDynamicallyQuantizableLinear"),
    "one_module_twice": (pair_of("one") | pair_of("same"), "'same' and 'one' are one module"),
    "width": (pair_of("up", k=9), "'up' has a weight of (12, 8), the adapter is for one of (12, 9)"),
    "shard": (pair_of("up", n=6), "'up' has a weight of (12, 8), the adapter is for one of (6, 8)"),
    "ranks": (
        {"up.lora_A.weight": torch.ones(2, 8), "up.lora_B.weight": torch.ones(12, 3)}, "'up' has lora_A (2, 8)"
    ),
    "of_a_convolution": (
        {"up.lora_A.weight": torch.ones(2, 8, 1), "up.lora_B.weight": torch.ones(12, 2, 1)}, "only LoRA of linear"
    ),
    "half": ({"up.lora_A.weight": torch.ones(2, 8)}, "'up' lacks lora_B: there is only 'up.lora_A.weight'"),
    "alpha_alone": (UP | {"down.alpha": torch.tensor(2.0)}, "'down' lacks lora_A: there is only 'down.alpha'"),
    "no_rank": (pair_of("up", r=0), "'up' has lora_A (0, 8)"),
    "alphas": (UP | {"up.alpha": torch.ones(2)}, "the alpha of 'up' has shape (2,)"),
    "bias": (UP | {"up.lora_B.bias": torch.ones(6)}, "'up' has 12 outputs, the adapter's bias is (6,)"),
    "whole_bias": (UP | {"up.bias": torch.ones(12)}, "'up.bias' is no key of a LoRA"),
    "dora": (UP | {"up.lora_magnitude_vector": torch.ones(12)}, "'up.lora_magnitude_vector' is of a DoRA adapter"),
    "lokr": ({"up.lokr_w1": torch.ones(2, 2)}, "'up.lokr_w1' is of a LoKr adapter"),
    "loha": ({"up.hada_w1_a": torch.ones(2, 2)}, "'up.hada_w1_a' is of a LoHa adapter"),
    "text_encoder_alone": (
        pair_of("text_encoder.up"), "it has nothing for a Mixed, its keys are 'text_encoder.up.lora_A.weight'"
    ),
    "two_transformers": (
        pair_of("transformer.up") | pair_of("transformer_2.up"), "keys for transformer and for transformer_2"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("state", "message"), REFUSED.values(), ids=REFUSED)
def test_an_adapter_that_does_not_fit_is_refused_and_nothing_is_touched(tmp_path, state, message):
    model = tp_layers.apply(Mixed(), PAIR, group=ONE, check=False)
    file = write(tmp_path / "a.safetensors", state)
    with refused(model, str(tmp_path), message):
        tp_layers.load_adapter(model, file)
    assert adapters_of(model) == {}


def test_names_and_scales_that_are_wrong_are_refused(tmp_path):
    model = tp_layers.apply(randomise(Pair()), PAIR, group=ONE)
    file = write(tmp_path / "a.safetensors", keys(draw(Pair())))
    assert [tp_layers.load_adapter(model, file) for _ in range(2)] == ["default_0", "default_1"]
    assert tp_layers.load_adapter(model, file, name="style.v1") == "style.v1"
    loaded = "loaded are 'default_0', 'default_1', 'style.v1'"
    calls = {
        "already": lambda: tp_layers.load_adapter(model, file, name="style.v1"),
        "finite number": lambda: tp_layers.load_adapter(model, file, float("nan")),
        "must be a text": lambda: tp_layers.load_adapter(model, file, name=3),
        f"no adapter 'other': {loaded}": lambda: tp_layers.set_adapters(model, ["style.v1", "other"]),
        "one for each, and none twice": lambda: tp_layers.set_adapters(model, ["style.v1"], [1.0, 2.0]),
        "none twice": lambda: tp_layers.set_adapters(model, ["style.v1", "style.v1"]),
        "got True": lambda: tp_layers.set_adapters(model, "style.v1", True),
        f"no adapter 'gone': {loaded}": lambda: tp_layers.unload_adapter(model, "gone"),
    }
    scales = [[layer.scale for layer in layers] for layers in adapters_of(model).values()]
    for message, call in calls.items():
        with refused(model, message):
            call()
    assert [[layer.scale for layer in layers] for layers in adapters_of(model).values()] == scales
    tp_layers.unload_adapter(model, "default_0")
    assert tp_layers.load_adapter(model, file) == "default_0"
    with pytest.raises(ValueError, match="not sharded by tp_layers"):
        tp_layers.load_adapter(Pair(), file)


def differing(group, files, scale):
    model = tp_layers.apply(randomise(Pair()), PAIR, group=group)
    told = []
    for file, own in ((files[group.rank], 1.0), (files[0], 1.0 + scale * group.rank), (files[2 * group.rank], 1.0)):
        try:
            tp_layers.load_adapter(model, file, own)
            told.append("loaded")
        except (ValueError, FileNotFoundError) as error:
            told.append(str(error))
    return told, adapters_of(model)


def test_ranks_that_see_other_files_or_scales_all_refuse(ranks, tmp_path):
    files = [write(tmp_path / f"{seed}.safetensors", keys(draw(Pair(), seed=seed))) for seed in (0, 1)]
    found = ranks(2, differing, [*files, str(tmp_path / "missing.safetensors")], 0.5)
    for rank, ((file, scale, missing), adapters) in enumerate(found):
        assert "has another model, checkpoint" in file and "has another model, checkpoint" in scale
        assert "missing.safetensors is neither a file nor a folder" in missing and adapters == {}
        assert ("rank 1 of 2 failed" in missing) == (rank == 0)


def test_keys_of_text_encoders_are_skipped_with_a_warning(tmp_path, caplog):
    model = tp_layers.apply(randomise(Pair()), PAIR, group=ONE)
    others = pair_of("text_encoder.layers.0.q_proj") | {"lora_te1_x.lora_down.weight": torch.ones(2, 2)}
    tp_layers.load_adapter(model, write(tmp_path / "a.safetensors", keys(draw(Pair())) | others))
    assert "skipped 3 keys for other components: 'lora_te1_x.lora_down.weight'" in caplog.text
    assert len(adapters_of(model)["default_0"]) == 2


def test_full_weights_read_in_place_are_refused(tmp_path):
    model = tp_layers.apply(Pair(), PAIR, group=ONE, copy=False)
    with pytest.raises(ValueError, match=r"reads its part of a full weight \(copy=False\)"):
        tp_layers.load_adapter(model, write(tmp_path / "a.safetensors", keys(draw(Pair()))))
    assert not adapters_of(model)


def in_order(model, arguments):
    """The arguments of the model's forward as positional ones, None for those before the last that are not given."""
    names = list(inspect.signature(model.forward).parameters)
    return [arguments.get(name) for name in names[: 1 + max(map(names.index, arguments))]]


def test_a_scale_that_diffusers_hands_to_peft_is_refused(tmp_path):
    family = FAMILIES["FluxTransformer2DModel"]
    model, inputs = tp_layers.apply(family.build(), group=ONE), family.inputs()
    file = write(tmp_path / "a.safetensors", keys(draw(family.build(), only="to_q")))
    name = tp_layers.load_adapter(model, file)
    run(model, inputs | {"joint_attention_kwargs": {"scale": 1.0}})
    with pytest.raises(ValueError, match=r"scale in joint_attention_kwargs .* use tp_layers.set_adapters"):
        run(model, inputs | {"joint_attention_kwargs": {"scale": 0.5}})
    with pytest.raises(ValueError, match="scale in joint_attention_kwargs"):
        model(*in_order(model, inputs | {"joint_attention_kwargs": {"scale": 0.5}}))
    tp_layers.unload_adapter(model, name)
    run(model, inputs | {"joint_attention_kwargs": {"scale": 0.5}})


def test_projections_that_diffusers_has_fused_are_adapted_as_they_are_read(tmp_path):
    model = tp_layers.apply(REGISTERED["FluxTransformer2DModel, fused"].build(), group=ONE)
    parts = pair_of("transformer.transformer_blocks.0.attn.to_q", 64, 64)
    with refused(model, "'transformer_blocks.0.attn.to_q' is not read, as the projections are fused in"):
        tp_layers.load_adapter(model, write(tmp_path / "a.safetensors", parts))
    fused = pair_of("transformer.transformer_blocks.0.attn.to_qkv", 192, 64)
    tp_layers.load_adapter(model, write(tmp_path / "b.safetensors", fused))
    assert len(adapters_of(model)["default_0"]) == 1


COMPONENTS = {
    "second_transformer": (Pair, PAIR, "transformer_2.up"),
    "peft": (Pair, PAIR, "base_model.model.up"),
    "ai_toolkit": (Pair, PAIR, "diffusion_model.up"),
    "default_name": (Pair, PAIR, "up"),
}


@pytest.mark.parametrize(("build", "plan", "path"), COMPONENTS.values(), ids=COMPONENTS)
def test_what_stands_before_the_path_of_a_layer_may_be_a_component(tmp_path, build, plan, path):
    model = tp_layers.apply(build(), plan, group=ONE)
    state = {key.replace("lora_A.", "lora_A.default."): it for key, it in pair_of(path).items()}
    tp_layers.load_adapter(model, write(tmp_path / "a.safetensors", state))
    assert len(model.up.adapters) == 1 and model.down.adapters == {}
