"""Checkpoints of transformers' models under other names than the model's, with more tensors, or with ties."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn
from transformers import initialization

import tp_layers
from checkpoints import identical, state_of
from test_load_transformers import same, tensors, ties
from text_models import GATED, TEXT, TEXT_MODELS, decoder
from tp_layers.group import Group

ONE = Group()
T5, TIED, LLAMA = TEXT_MODELS["T5"], TEXT_MODELS["Qwen3, tied"], TEXT_MODELS["Llama"]


@pytest.fixture(autouse=True)
def silence():
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()


def rewrite(folder: Path, change: Any) -> dict[str, torch.Tensor]:
    """Replaces the state of a checkpoint in one file by what `change` makes of it."""
    state = change(state_of(folder))
    save_file({name: tensor.clone() for name, tensor in state.items()}, folder / "model.safetensors")
    return state


def save_bert(folder: Path) -> Any:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=16,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return transformers.BertModel


BERT_PLAN = {"encoder.layer.*.intermediate.dense": "colwise", "encoder.layer.*.output.dense": "rowwise"}
OLD_NAMES = {
    "gamma and beta": lambda name: name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"),
    "the prefix of a model with a head": lambda name: f"bert.{name}",
}


@pytest.mark.parametrize("old", OLD_NAMES)
def test_old_names_are_those_transformers_knows(tmp_path, old):
    cls = save_bert(tmp_path)
    before = set(state_of(tmp_path))
    after = rewrite(tmp_path, lambda state: {OLD_NAMES[old](name): tensor for name, tensor in state.items()})
    assert len(before - set(after)) >= 6
    same(tp_layers.load(cls, tmp_path, plan=BERT_PLAN, group=ONE), cls.from_pretrained(tmp_path))


def test_a_model_with_a_head_takes_the_names_of_its_base(tmp_path):
    text = TEXT_MODELS["Qwen3, tied"]
    text.build().model.save_pretrained(tmp_path)
    assert all(not name.startswith("model.") for name in state_of(tmp_path))
    same(tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE), text.cls.from_pretrained(tmp_path))


def test_tensors_that_the_class_ignores_are_not_read(tmp_path):
    whole = transformers.T5ForConditionalGeneration(transformers.T5Config(**GATED))
    whole.save_pretrained(tmp_path)
    assert any(name.startswith("decoder.") for name in state_of(tmp_path))
    state = {**state_of(tmp_path)}
    state.pop("lm_head.weight", None)
    save_file(state, tmp_path / "model.safetensors")
    model, report = tp_layers.load(T5.cls, tmp_path, plan=T5.plan, group=ONE, report=True)
    same(model, T5.cls.from_pretrained(tmp_path))
    assert report.bytes_read == report.bytes_held


OLD_BUFFERS = {
    "CLIP text": ("embeddings.position_ids", torch.arange(16)[None]),
    "Qwen3": ("model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(2)),
}


@pytest.mark.parametrize("name", OLD_BUFFERS)
def test_buffers_that_were_saved_once_are_not_read(tmp_path, name):
    text, (key, value) = TEXT_MODELS[name], OLD_BUFFERS[name]
    text.save(tmp_path)
    rewrite(tmp_path, lambda state: {**state, key: value})
    same(tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE), text.cls.from_pretrained(tmp_path))


def test_an_extra_tensor_is_refused_unless_it_is_not_to_be_checked(tmp_path, caplog):
    text = TEXT_MODELS["Qwen3"]
    text.save(tmp_path)
    base: Any = transformers.Qwen3Model
    plan = {key.removeprefix("model."): style for key, style in text.plan.items()}
    message = r"the checkpoint has \['lm_head\.weight'\], which Qwen3Model does not; check=False loads it without them"
    with pytest.raises(ValueError, match=message):
        tp_layers.load(base, tmp_path, plan=plan, group=ONE)
    assert not caplog.records
    model = tp_layers.load(base, tmp_path, plan=plan, group=ONE, check=False)
    assert identical(tensors(model), tensors(base.from_pretrained(tmp_path)))
    assert ["lm_head.weight" in record.message for record in caplog.records if "not read" in record.message] == [True]


def test_a_missing_tensor_is_refused_though_transformers_would_draw_it(tmp_path):
    LLAMA.save(tmp_path)
    rewrite(tmp_path, lambda state: {name: it for name, it in state.items() if name != "norm.weight"})
    for check in (True, False):
        with pytest.raises(ValueError, match=r"the checkpoint lacks \['norm\.weight'\], which LlamaModel needs"):
            tp_layers.load(LLAMA.cls, tmp_path, plan=LLAMA.plan, group=ONE, check=check)


def test_two_names_that_become_one_are_refused(tmp_path):
    text = TEXT_MODELS["Qwen2.5-VL"]
    text.save(tmp_path)
    rewrite(tmp_path, lambda state: {**state, "model.language_model.norm.weight": state["model.norm.weight"]})
    message = (
        r"'model\.language_model\.norm\.weight' and 'model\.norm\.weight' .* are both 'model\.language_model\.norm"
    )
    with pytest.raises(ValueError, match=message):
        tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE)


MOE = dict(TEXT, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8, decoder_sparse_step=1)


def test_tensors_that_would_have_to_be_merged_are_refused(tmp_path):
    cls: Any = transformers.Qwen3MoeForCausalLM
    cls(transformers.Qwen3MoeConfig(**MOE)).save_pretrained(tmp_path)
    plan = {key: style for key, style in decoder("model.layers").items() if "self_attn" in key}
    message = (
        r"'model\.layers\.0\.mlp\.experts\.0\.down_proj\.weight' .* by \[MergeModulelist.*save_original_format=False"
    )
    with pytest.raises(ValueError, match=message):
        tp_layers.load(cls, tmp_path, plan=plan, group=ONE)
    # What the message says to do.
    cls.from_pretrained(tmp_path).save_pretrained(tmp_path / "new", save_original_format=False)
    same(tp_layers.load(cls, tmp_path / "new", plan=plan, group=ONE), cls.from_pretrained(tmp_path / "new"))


TIES = {"T5": (T5, "shared.weight", "encoder.embed_tokens.weight"),
        "a language model": (TIED, "model.embed_tokens.weight", "lm_head.weight")}  # fmt: skip
tied = pytest.mark.parametrize("case", TIES)


@tied
@pytest.mark.parametrize("kept", ["source", "target", "both"])
def test_tied_parameters_share_one_storage(tmp_path, case, kept):
    text, source, target = TIES[case]
    text.save(tmp_path)
    entries = {"source": [source], "target": [target], "both": [source, target]}[kept]

    def change(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        value = state.pop(source)
        return {**state, **dict.fromkeys(entries, value)}

    rewrite(tmp_path, change)
    model, report = tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE, report=True)
    same(model, text.cls.from_pretrained(tmp_path))
    assert ties(model) and report.bytes_read == report.bytes_held


@tied
def test_tied_parameters_that_differ_in_the_checkpoint_are_untied_with_a_warning(tmp_path, caplog, case):
    text, source, target = TIES[case]
    text.save(tmp_path)
    rewrite(tmp_path, lambda state: {**state, target: state[source] + 1})
    model = tp_layers.load(text.cls, tmp_path, plan=text.plan, group=ONE)
    assert not ties(model) and f"'{target}' and '{source}' differ in the checkpoint" in caplog.text
    assert identical(tensors(model), tensors(text.cls.from_pretrained(tmp_path)))


class Drawn(transformers.PreTrainedModel):
    """A model with all that from_pretrained treats in a way of its own."""

    config_class = transformers.BertConfig
    _keys_to_ignore_on_load_missing = ("steps", "up")
    _keep_in_fp32_modules_strict = ("down",)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.register_buffer("table", torch.linspace(0, 1, 7) ** 3, persistent=False)
        self.register_buffer("scale", torch.linspace(0, 1, 7))
        self.register_buffer("exact", torch.linspace(0, 1, 7, dtype=torch.float64))
        self.register_buffer("steps", torch.arange(3))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, Drawn):
            initialization.copy_(module.table, torch.linspace(0, 1, 7) ** 3)
            initialization.copy_(module.steps, torch.arange(3))


DRAWN_PLAN = {"up": "colwise", "down": "rowwise"}


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16], ids=["as stored", "bfloat16", "float16"])
@pytest.mark.parametrize("lacks", [(), ("steps",)], ids=["whole", "a buffer that may be missing"])
def test_buffers_and_kept_dtypes_are_those_of_from_pretrained(tmp_path, dtype, lacks):
    Drawn(transformers.BertConfig()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {name: it for name, it in state.items() if name not in lacks})
    model = tp_layers.load(Drawn, tmp_path, plan=DRAWN_PLAN, group=ONE, dtype=dtype)
    wanted = Drawn.from_pretrained(tmp_path, dtype=dtype or torch.float32)
    assert model.table.dtype == (dtype or torch.float32) and model.down.weight.dtype == torch.float32
    if dtype is None:
        # from_pretrained casts a buffer in float64 too.
        wanted.exact = state_of(tmp_path)["exact"]
    assert identical(tensors(model), tensors(wanted))


def test_a_parameter_that_may_be_missing_is_refused(tmp_path):
    Drawn(transformers.BertConfig()).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda state: {name: it for name, it in state.items() if name != "up.bias"})
    with pytest.raises(ValueError, match=r"the checkpoint lacks \['up\.bias'\], which Drawn needs"):
        tp_layers.load(Drawn, tmp_path, plan=DRAWN_PLAN, group=ONE)


def test_weights_elsewhere_are_refused(tmp_path):
    LLAMA.save(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace("{", '{"transformers_weights": "other.safetensors",', 1))
    with pytest.raises(ValueError, match=r"LlamaModel has weights in other\.safetensors: load it whole"):
        tp_layers.load(LLAMA.cls, tmp_path, plan=LLAMA.plan, group=ONE)
