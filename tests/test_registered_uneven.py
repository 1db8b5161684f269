"""Three heads on two ranks: unequal parts of every registered class give what one device gives."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

import tp_layers
from close import FLOAT32, relative_error
from families import REGISTERED, digest, run
from tp_layers.group import Group
from tp_layers.plans.registry import plan_for

HEADS, SIZE = 3, 2
# No model of three heads can be made of these tiny configs: another width is fixed, or must be divisible by them.
NOT_OF_THREE = {
    "ConsisIDTransformer3DModel",
    "CogVideoXTransformer3DModel, 1.0",
    "CosmosTransformer3DModel, Transfer2.5",
    "Gemma2ForCausalLM",
    "Gemma2Model",
    "Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3Model",
    "Gemma3TextModel",
    "Krea2Transformer2DModel",
    "LTX2VideoTransformer3DModel, gated and perturbed",
    "LlamaForCausalLM",
    "LlamaForCausalLM, a vocabulary that does not divide",
    "LlamaModel",
    "Mistral3ForConditionalGeneration",
    "Mistral3Model",
}
# torch's grouped GEMM takes rows of a multiple of 16 bytes: a third of these experts' channels is none.
UNALIGNED = {"NucleusMoEImageTransformer2DModel, grouped"}


def sharded(group: Group, label: str) -> tuple[list[torch.Tensor], int]:
    family = REGISTERED[label]
    model = family.build(HEADS)
    tp_layers.apply(model, plan_for(model, modulation="sharded"), group=group, uneven=True)
    outputs = run(model, family.inputs())
    return (outputs if group.rank == 0 else []), digest(outputs)


@pytest.mark.slow
@pytest.mark.families
@pytest.mark.parametrize("label", [label for label in REGISTERED if label not in NOT_OF_THREE | UNALIGNED])
def test_unequal_heads_give_what_one_device_gives(ranks, label):
    wanted = run(REGISTERED[label].build(HEADS), REGISTERED[label].inputs())
    results = ranks(SIZE, sharded, label)
    assert len({bits for _, bits in results}) == 1
    for got, reference in zip(results[0][0], wanted, strict=True):
        assert relative_error(got, reference) <= FLOAT32


@pytest.mark.slow
@pytest.mark.families
@pytest.mark.parametrize("label", sorted(NOT_OF_THREE))
def test_the_others_cannot_have_three_heads(label):
    with pytest.raises((ValueError, RuntimeError, StrictDataclassError)):
        run(REGISTERED[label].build(HEADS), REGISTERED[label].inputs())
