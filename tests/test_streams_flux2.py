"""FLUX.2's double blocks: two all-reduces instead of four, whatever else is done to the model."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_flux2 import Flux2AttnProcessor, Flux2KVAttnProcessor
from torch import nn

import tp_layers
from calls import Calls
from close import FLOAT32, relative_error
from families import FAMILIES, digest, run
from functions import Functions
from tp_layers.group import Group
from tp_layers.layers.flux2 import JointAttention
from tp_layers.plans import streams

FLUX2 = FAMILIES["Flux2Transformer2DModel"]
# Of a model of one double and two single blocks, with its modulations whole.
JOINED, HALF, APART = 4, 5, 6


def sharded(group: Group, **how: Any) -> Any:
    model = FLUX2.build()
    return tp_layers.apply(model, tp_layers.plan_for(model, modulation="whole"), group=group, **how)


def nothing(model: Any) -> None:
    """As it is."""


def their_processor(model: Any) -> None:
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2AttnProcessor())


def another_processor(model: Any) -> None:
    for block in model.transformer_blocks:
        block.attn.set_processor(Flux2KVAttnProcessor())


def another_forward(model: Any) -> None:
    block = model.transformer_blocks[0]
    forward = block.ff_context.forward
    block.ff_context.forward = lambda x: forward(x)


def training(model: Any) -> None:
    model.train()


def hooks_on_one_rank(model: Any) -> None:
    if model.rank == 0:
        block = model.transformer_blocks[0]
        for module in (block.ff, block.ff_context, block.ff_context.linear_out, block.attn.to_out[0], block.attn):
            module.register_forward_hook(lambda _, args, y: None)


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.module(x)


def wrapped_attention_output(model: Any) -> None:
    for block in model.transformer_blocks:
        block.attn.to_add_out = Wrapper(block.attn.to_add_out)


def wrapped_mlp(model: Any) -> None:
    for block in model.transformer_blocks:
        block.ff_context = Wrapper(block.ff_context)


def wrapped_mlp_output(model: Any) -> None:
    for block in model.transformer_blocks:
        block.ff_context.linear_out = Wrapper(block.ff_context.linear_out)


def wrapped_image_output(model: Any) -> None:
    for block in model.transformer_blocks:
        block.attn.to_out[0] = Wrapper(block.attn.to_out[0])


# What is done to a sharded model, and how many all-reduces it then makes.
DONE: dict[Callable[[Any], None], int] = {
    nothing: JOINED,
    their_processor: HALF,
    another_processor: HALF,
    another_forward: HALF,
    training: HALF,
    wrapped_attention_output: HALF,
    wrapped_image_output: HALF,
    wrapped_mlp: HALF,
    wrapped_mlp_output: HALF,
    hooks_on_one_rank: JOINED,
}


def outputs(group: Group, done: Callable[[Any], None], how: dict[str, Any]) -> tuple[list[torch.Tensor], str, int]:
    model = sharded(group, **how)
    model.rank = group.rank
    done(model)
    run(model, FLUX2.inputs())
    with Calls() as calls:
        found = run(model, FLUX2.inputs())
    return found, digest(found), sum("allreduce" in name for name in calls.names)


def test_describe_counts_them_so():
    model = FLUX2.build()
    report = tp_layers.describe(model, tp_layers.plan_for(model, modulation="whole"), size=2)
    assert [(made.kind, made.count) for made in report.collectives] == [("all-reduce", JOINED)]


@pytest.mark.parametrize("fuse", [None, True], ids=["plain", "fused"])
@pytest.mark.parametrize("done", DONE, ids=[done.__name__ for done in DONE])
def test_the_model_is_right_and_makes_so_many_reductions(ranks, done, fuse):
    wanted = run(FLUX2.build(), FLUX2.inputs())
    found = ranks(2, outputs, done, {"fuse": fuse})
    assert found[0][1] == found[1][1]
    assert [count for *_, count in found] == [DONE[done]] * 2
    for got, full in zip(found[0][0], wanted, strict=True):
        assert relative_error(got, full) <= FLOAT32


# In chunks each layer has its own; sums in rank order are no all-reduces.
OPTIONS = {"overlap": ({"overlap": 2}, 2 * APART), "deterministic": ({"deterministic": True}, 0)}
OPTIONS["reduce_dtype"] = ({"reduce_dtype": torch.float64}, JOINED)


@pytest.mark.parametrize("option", OPTIONS)
def test_so_it_is_with_every_option(ranks, option):
    how, count = OPTIONS[option]
    wanted = run(FLUX2.build(), FLUX2.inputs())
    found = ranks(2, outputs, nothing, how)
    assert found[0][1] == found[1][1]
    assert [made for *_, made in found] == [count] * 2
    for got, full in zip(found[0][0], wanted, strict=True):
        assert relative_error(got, full) <= FLOAT32


def unknown(group: Group, name: str) -> tuple[list[torch.Tensor], int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, name, "0123456789abcdef")
        found, _, count = outputs(group, nothing, {})
    return found, count


@pytest.mark.parametrize("name", ["BLOCK", "PROCESSOR", "FEED_FORWARD"])
def test_code_that_is_not_known_is_left_as_it_is(ranks, name):
    wanted = run(FLUX2.build(), FLUX2.inputs())
    for found, count in ranks(2, unknown, name):
        assert count == HALF and relative_error(found[0], wanted[0]) <= FLOAT32


def double_input(module: Any, args: tuple[torch.Tensor]) -> None:
    args[0].mul_(2)


def doubled(model: Any) -> Any:
    """The text MLP's input is changed in place, behind the block's back."""
    model.transformer_blocks[0].ff_context.register_forward_pre_hook(double_input)
    return model


def changed(group: Group) -> list[torch.Tensor]:
    return run(doubled(sharded(group)), FLUX2.inputs())


def test_an_input_that_was_changed_after_the_first_half_is_seen(ranks):
    (wanted, *_), whole = run(doubled(FLUX2.build()), FLUX2.inputs()), run(FLUX2.build(), FLUX2.inputs())
    assert relative_error(wanted, whole[0]) > 1e-3
    for found in ranks(2, changed):
        assert relative_error(found[0], wanted) <= FLOAT32


def gemms(group: Group, mode: Callable[[], Any]) -> int:
    model = sharded(group)
    with mode(), Functions() as functions:
        model(**FLUX2.inputs())
    return functions.counts["linear"] + functions.counts["mm"]


def test_nothing_is_computed_twice_where_streams_stay_apart(ranks):
    assert ranks(2, gemms, torch.inference_mode) == ranks(2, gemms, torch.no_grad)


def halves(group: Group) -> tuple[float, list[bool]]:
    """How far the layers' outputs, as hooks see them, are from the unsharded model's."""
    paths = [f"transformer_blocks.0.{name}" for name in ("ff", "ff_context", "attn.to_out.0", "attn.to_add_out")]
    seen: dict[str, list[torch.Tensor]] = {path: [] for path in paths}
    for model in (FLUX2.build(), sharded(group)):
        for path in paths:
            model.get_submodule(path).register_forward_hook(lambda _, args, y, path=path: seen[path].append(y.clone()))
        run(model, FLUX2.inputs())
    return max(relative_error(got, full) for full, got in seen.values()), [len(ys) == 2 for ys in seen.values()]


def test_hooks_see_each_layer_once_with_its_whole_output(ranks):
    for error, once in ranks(2, halves):
        assert all(once) and error <= FLOAT32


def failing(group: Group) -> list[bool]:
    """Whether streams and MLP have let go of everything once a call has failed."""
    model, fails = sharded(group, check_inputs=False), [True]

    def fail(module: nn.Module, args: Any) -> None:
        if fails[0]:
            raise ValueError("as asked")

    block = model.transformer_blocks[0]
    kept = []
    for module in (block.ff, block.attn.to_add_out):
        fails[0] = True
        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(ValueError, match="as asked"):
            run(model, FLUX2.inputs())
        handle.remove()
        pairs = (block.ff_context.linear_out.streams, block.attn.to_add_out.streams)
        kept += [block.ff_context._started is None, *(pair.x is None and pair.y is None for pair in pairs)]
    return kept


def test_nothing_is_held_after_a_call_that_failed(ranks):
    assert ranks(2, failing) == [[True] * 6] * 2


def copied(group: Group) -> tuple[float, int]:
    model = sharded(group)
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with Calls() as calls:
        found = run(again, FLUX2.inputs())
    wanted = run(FLUX2.build(), FLUX2.inputs())
    kept = again.transformer_blocks[0].attn.processor
    assert isinstance(kept, JointAttention)
    return relative_error(found[0], wanted[0]), sum("allreduce" in name for name in calls.names)


def test_a_copy_of_the_model_has_layers_of_its_own(ranks):
    for error, count in ranks(2, copied):
        # Its first call compares the inputs too.
        assert error <= FLOAT32 and count >= JOINED


def test_one_rank_keeps_what_it_has():
    model = tp_layers.apply(FLUX2.build(), group=Group())
    assert type(model.transformer_blocks[0].attn.processor) is Flux2AttnProcessor
    assert not any("forward" in vars(module) for module in model.modules())
