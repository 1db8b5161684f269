"""The plans that transformers gives its models: translated, and used where none is registered."""

from typing import Any

import pytest
import torch
import transformers
from torch import nn

import tp_layers
from close import FLOAT32, relative_error
from families.decoders import decoder, gemma, prompt, tied
from families.family import Family, Values, run
from families.t5 import t5
from tp_layers.describe import describe
from tp_layers.group import Group
from tp_layers.plans.own_plans import TRANSLATED, own_plan
from tp_layers.plans.registry import plan_for
from tp_layers.plans.shard import sharding_of
from tp_layers.plans.styles import style_of


def plain(heads: int) -> Values:
    return {key: value for key, value in decoder(heads).items() if key != "sliding_window"} | dict(hidden_size=80)


def gemma4(heads: int) -> Values:
    return gemma(heads) | dict(hidden_size_per_layer_input=0, num_kv_shared_layers=0, global_head_dim=12)


# With what their plans have that those of Llama's kin do not have.
MODELS = {
    "q, k, v and gate, up fused": Family("Phi3ForCausalLM", plain, prompt, config_class="Phi3Config"),
    "norms over all heads": Family("Olmo2ForCausalLM", plain, prompt, config_class="Olmo2Config"),
    "q, k, v fused by heads": Family("GPTNeoXModel", plain, prompt, config_class="GPTNeoXConfig"),
    "keys of other configs": Family("Gemma4ForCausalLM", gemma4, prompt, config_class="Gemma4TextConfig"),
    "a tied table": Family(
        "Qwen2ForCausalLM", lambda heads: plain(heads) | tied(heads), prompt, config_class="Qwen2Config"
    ),
}


def sharded(group: Group, name: str) -> tuple[list[torch.Tensor], int]:
    model = tp_layers.apply(MODELS[name].build(), group=group)
    return run(model, MODELS[name].inputs()), len(sharding_of(model).resolved.specs)


@pytest.mark.parametrize("name", MODELS)
def test_a_translated_plan_gives_what_one_device_gives(ranks, name):
    model = MODELS[name].build()
    wanted = run(model, MODELS[name].inputs())
    for size in (2, 4):
        results = ranks(size, sharded, name)
        for outputs, count in results:
            assert count > 6
            for got, first, reference in zip(outputs, results[0][0], wanted, strict=True):
                assert torch.equal(got, first) and relative_error(got, reference) <= FLOAT32
    report = describe(model, size=2)
    assert report.held_bytes < 0.53 * report.full_bytes and not report.notes


def test_every_translation_is_a_style():
    assert [style_of(value) for value in TRANSLATED.values()]


def build(name: str, config: str, **settings: Any) -> nn.Module:
    with torch.device("meta"):
        return getattr(transformers, name)._from_config(getattr(transformers, config)(**settings))


def test_a_style_that_is_not_carried_out_is_refused_with_its_key():
    model = build("MixtralModel", "MixtralConfig", **decoder(4), num_local_experts=2)
    with pytest.raises(ValueError, match=r"of MixtralModel has the style 'moe_tp_experts' for 'layers.*experts'"):
        tp_layers.apply(model, group=Group(0, 2))


def test_a_model_without_a_plan_is_told_so():
    model = build("BertModel", "BertConfig", num_hidden_layers=1)
    with pytest.raises(ValueError, match="no plan for BertModel: pass plan="):
        tp_layers.apply(model, group=Group(0, 2))


class Derived(transformers.T5EncoderModel):
    """A user's subclass: transformers gives its instances an empty plan."""


class DerivedDecoder(transformers.LlamaModel):
    """transformers gives its instances a plan, of less than ours."""


def test_a_registered_plan_holds_for_subclasses_before_transformers_own():
    with torch.device("meta"):
        encoder: Any = Derived(transformers.T5Config(**t5(4)))
        decoder_: Any = DerivedDecoder(transformers.LlamaConfig(**decoder(4)))
    assert encoder.tp_plan == {} and own_plan(decoder_)
    for model, base in ((encoder, transformers.T5EncoderModel), (decoder_, transformers.LlamaModel)):
        assert list(plan_for(model)) == list(plan_for(base._from_config(model.config)))
        assert sharding_of(tp_layers.apply(model, group=Group(0, 2))).resolved.specs
