"""Models that use the attention's output before its projection have no plan; one that gathers there is right."""

import diffusers
import pytest

import tp_layers
from close import FLOAT32, randomise, relative_error
from families import run
from families.easyanimate import easyanimate, easyanimate_inputs
from families.motif_video import motif_video, motif_video_inputs
from refused import refused
from tp_layers import Divide
from tp_layers.group import Group
from tp_layers.plans.shared import joint_attention, self_attention

QKV = ("to_q", "to_k", "to_v")


def gathered(path, *names):
    return {f"{path}.{name}": "colwise_gather" for name in names}


def motif():
    """Two single blocks with cross-attention, and one of the decoder without."""
    config = dict(motif_video(4), num_single_layers=3, enable_text_cross_attention_single=True)
    return randomise(diffusers.MotifVideoTransformer3DModel(**config)).eval()


# What the refusals advise, for the blocks in question.
MOTIF = {
    **gathered("single_transformer_blocks.*.attn", *QKV),
    **gathered("single_transformer_blocks.*", "proj_mlp"),
    "single_transformer_blocks.*.proj_out": "rowwise_split_input",
    "single_transformer_blocks.*.cross_attn": Divide("heads"),
    **self_attention("single_transformer_blocks.*.cross_attn"),
}


def animate():
    """One block of two streams, and two that they share."""
    config = dict(easyanimate(4), num_layers=3, mmdit_layers=1)
    return randomise(diffusers.EasyAnimateTransformer3DModel(**config)).eval()


ANIMATE = {
    "transformer_blocks.0.attn1": Divide("heads"),
    **joint_attention("transformer_blocks.0.attn1"),
    **gathered("transformer_blocks.1.attn1", *QKV),
    "transformer_blocks.1.attn1.to_out.0": "rowwise_split_input",
    **gathered("transformer_blocks.2.attn1", *QKV),
    "transformer_blocks.2.attn1.to_out.0": "rowwise_split_input",
}

MODELS = {
    "motif_video": (
        motif,
        MOTIF,
        motif_video_inputs,
        ["MotifVideoTransformer3DModel with enable_text_cross_attention_single", "'colwise_gather' for attn.to_q"],
    ),
    "easyanimate": (
        animate,
        ANIMATE,
        easyanimate_inputs,
        ["with mmdit_layers=1 has no plan: the last 2 of its 3 blocks", "'rowwise_split_input' for attn1.to_out.0"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_such_a_model_is_refused_with_what_to_do(name):
    build, _, _, message = MODELS[name]
    model = build()
    with refused(model, *message):
        tp_layers.apply(model, group=Group(0, 2))


def sharded(group, name):
    build, plan, inputs, _ = MODELS[name]
    return run(tp_layers.apply(build(), plan, group=group), inputs())


@pytest.mark.parametrize("name", MODELS)
def test_the_plan_that_the_refusal_advises_is_right(ranks, name):
    build, _, inputs, _ = MODELS[name]
    (wanted,) = run(build(), inputs())
    for (got,) in ranks(2, sharded, name):
        assert relative_error(got, wanted) <= FLOAT32
