"""What people do to models, done to fused ones: processors, backends, checkpointing, copies, caches, files, compile."""

import copy
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FirstBlockCacheConfig
from diffusers.models.attention_dispatch import AttentionBackendName, attention_backend
from diffusers.models.transformers import transformer_flux2
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import tp_layers
from checkpoints import identical, state_of
from close import FLOAT32, randomise, relative_error
from families import FAMILIES, run
from functions import Functions
from tp_layers.group import Group
from tp_layers.layers.flux2 import ParallelSelfAttention
from tp_layers.layers.fused import FusedSwiGLU
from tp_layers.layers.together import are_adjacent
from tp_layers.plans import fuse

FLUX, FLUX2 = "FluxTransformer2DModel", "Flux2Transformer2DModel"
names = pytest.mark.parametrize("name", [FLUX, FLUX2])
Theirs, KV = transformer_flux2.Flux2ParallelSelfAttnProcessor, transformer_flux2.Flux2KVParallelSelfAttnProcessor


def fused(name: str, group: Group = Group(), model: Any = None, want: bool = True) -> Any:  # noqa: B008 (frozen)
    return tp_layers.apply(model or FAMILIES[name].build(), group=group, fuse=want)


def processors(model: Any) -> list[Any]:
    return [block.attn.processor for block in model.single_transformer_blocks]


def right(model: Any, name: str, reference: Any = None) -> None:
    """The model gives what the unsharded one does."""
    wanted = run(reference or FAMILIES[name].build(), FAMILIES[name].inputs())
    for got, full in zip(run(model, FAMILIES[name].inputs()), wanted, strict=True):
        assert relative_error(got, full) <= FLOAT32


# Setting one sets that of the process too.
@attention_backend("native")
def test_an_attention_backend_is_used_whenever_it_is_set(monkeypatch):
    used, dispatch = [], transformer_flux2.dispatch_attention_fn
    after, before = fused(FLUX2), FAMILIES[FLUX2].build()
    after.set_attention_backend("_native_math")
    before.set_attention_backend("_native_math")
    before = fused(FLUX2, model=before)

    def counted(*args: Any, **kwargs: Any) -> torch.Tensor:
        used.append(kwargs["backend"])
        return dispatch(*args, **kwargs)

    monkeypatch.setattr("diffusers.models.attention_dispatch.dispatch_attention_fn", counted)
    for model in (after, before):
        assert all(type(it) is ParallelSelfAttention for it in processors(model))
        right(model, FLUX2)
        assert used == [AttentionBackendName._NATIVE_MATH] * 2
        used.clear()


def other_processors(group: Group) -> None:
    model = FAMILIES[FLUX2].build()
    model.single_transformer_blocks[1].attn.set_processor(KV())
    model = fused(FLUX2, group, model)
    assert [type(it) for it in processors(model)] == [ParallelSelfAttention, KV]
    note = "'single_transformer_blocks.*.attn' is not fused: its processor is a Flux2KVParallelSelfAttnProcessor"
    assert tp_layers.describe(model).notes == [note] and note in str(tp_layers.describe(model))
    right(model, FLUX2)
    for kind in (KV, Theirs):
        for block in model.single_transformer_blocks:
            block.attn.set_processor(kind())
        right(model, FLUX2)
    ours = [ParallelSelfAttention() for _ in model.single_transformer_blocks]
    for block, processor in zip(model.single_transformer_blocks, ours, strict=True):
        block.attn.set_processor(processor)
    right(model, FLUX2)


def test_another_processor_is_kept_and_may_be_set_later(ranks):
    ranks(2, other_processors)


@pytest.mark.parametrize(
    ("name", "known", "note"),
    [
        (FLUX, "SINGLE_BLOCK", "'single_transformer_blocks.*' is not fused: its code is another"),
        (FLUX2, "FLUX2_SINGLE_BLOCK", "'single_transformer_blocks.*' is not fused: its code is another"),
        (FLUX2, "PARALLEL", "'single_transformer_blocks.*.attn' is not fused: its code is another"),
    ],
)
def test_code_that_is_not_known_is_left_as_it_is(monkeypatch, caplog, name, known, note):
    monkeypatch.setattr(fuse, known, "0123456789abcdef")
    with caplog.at_level(logging.WARNING, logger="tp_layers"):
        model = fused(name)
    assert [record.getMessage().startswith(note) for record in caplog.records] == [True]
    assert any("forward" in vars(module) for module in model.modules()) == (known == "PARALLEL")
    right(model, name)


def test_an_activation_with_hooks_is_called():
    model, called = FAMILIES[FLUX].build(), []
    model.single_transformer_blocks[0].act_mlp.register_forward_hook(lambda *_: called.append(1))
    model = fused(FLUX, model=model)
    note = "'single_transformer_blocks.*' is not fused: its activation has hooks, and would not be called"
    assert tp_layers.describe(model).notes == [note]
    right(model, FLUX)
    assert called == [1]


def test_what_has_a_forward_of_its_own_keeps_it():
    model, called = FAMILIES[FLUX2].build(), []
    feed_forward = model.transformer_blocks[0].ff
    forward = feed_forward.forward
    feed_forward.forward = lambda x: called.append(1) or forward(x)
    model = fused(FLUX2, model=model)
    assert tp_layers.describe(model).notes == ["'transformer_blocks.*.ff' is not fused: it has a forward of its own"]
    right(model, FLUX2)
    assert called == [1] and isinstance(model.transformer_blocks[0].ff_context, FusedSwiGLU)


def checkpointed(group: Group, name: str) -> list[dict[str, torch.Tensor]]:
    """The gradients with checkpointing and without."""
    found = []
    for with_it in (True, False):
        model = fused(name, group).train()
        if with_it:
            model.enable_gradient_checkpointing()
        model(**FAMILIES[name].inputs(), return_dict=False)[0].square().sum().backward()
        found.append({key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None})
    return found


@names
def test_gradient_checkpointing(ranks, name):
    for with_it, without in ranks(2, checkpointed, name):
        assert len(with_it) > 20 and with_it.keys() == without.keys()
        assert all(torch.equal(with_it[key], without[key]) for key in without)


def copied(group: Group, name: str) -> None:
    model = fused(name, group)
    run(model, FAMILIES[name].inputs())
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    right(again, name)
    with Functions() as functions:
        run(again, FAMILIES[name].inputs())
    joined = functions.counts["linear"]
    with Functions() as functions:
        run(model, FAMILIES[name].inputs())
    assert joined == functions.counts["linear"]


@names
def test_a_copy_is_fused_with_its_own_layers(ranks, name):
    ranks(2, copied, name)


def cached(group: Group, name: str) -> None:
    """Steps with a cache that leaves out all blocks but the first where the input has hardly changed."""
    outputs = []
    for want in (True, False):
        model = fused(name, group, want=want)
        model.enable_cache(FirstBlockCacheConfig(threshold=0.5))
        steps = []
        with model.cache_context("step"), Functions() as functions:
            for scale in (1.0, 1.001, -1.0):
                inputs = FAMILIES[name].inputs()
                steps += run(model, inputs | {"hidden_states": inputs["hidden_states"] * scale})
        outputs.append((steps, functions.counts["scaled_dot_product_attention"]))
    (found, count), (wanted, wanted_count) = outputs
    assert count == wanted_count == 7
    for got, full in zip(found, wanted, strict=True):
        assert relative_error(got, full) <= FLOAT32


def test_step_caches_find_the_blocks(ranks):
    ranks(2, cached, FLUX)


def through_files(group: Group, name: str, folder: Path) -> None:
    model, single = (tp_layers.load(FAMILIES[name].cls, folder / "a", group=group, fuse=want) for want in (True, False))
    assert list(model.state_dict()) == list(single.state_dict())
    pairs = zip(model.state_dict().values(), single.state_dict().values(), strict=True)
    assert all(torch.equal(*pair) and pair[0].is_contiguous() for pair in pairs)
    assert str(tp_layers.describe(model)) == str(tp_layers.describe(single))
    right(model, name)
    before = {key: (id(tensor), tensor.data_ptr()) for key, tensor in model.state_dict(keep_vars=True).items()}
    tp_layers.reload(model, folder / "b")
    assert before == {key: (id(it), it.data_ptr()) for key, it in model.state_dict(keep_vars=True).items()}
    right(model, name, other(name))
    tp_layers.save(model, folder / "saved")
    tp_layers.save(model, folder / "snapshot", sharded=True)
    right(tp_layers.load(FAMILIES[name].cls, folder / "snapshot", group=group, fuse=True), name, other(name))
    mapped = tp_layers.load(FAMILIES[name].cls, folder / "a", group=group, fuse=True, mmap=True)
    queries, keys = (getattr(mapped.transformer_blocks[0].attn, key).weight for key in ("to_q", "to_k"))
    assert not are_adjacent([queries, keys]) and queries.untyped_storage().nbytes() > 10 * queries.nbytes
    right(mapped, name)


def other(name: str) -> nn.Module:
    return randomise(FAMILIES[name].build(), seed=7)


@names
def test_a_fused_model_is_loaded_reloaded_and_saved_as_any(ranks, tmp_path, name):
    FAMILIES[name].build().save_pretrained(tmp_path / "a")
    other(name).save_pretrained(tmp_path / "b")
    ranks(2, through_files, name, tmp_path)
    assert identical(state_of(tmp_path / "saved"), state_of(tmp_path / "b"))


def graphs(name: str, want: bool) -> int:
    """How many graphs the blocks are compiled to, three of each kind; they give what the eager model does."""
    family = FAMILIES[name]
    config = family.config(4) | {"num_layers": 3, "num_single_layers": 3}
    reference = randomise(family.cls(**config)).eval()
    model = fused(name, model=copy.deepcopy(reference), want=want)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    right(model, name, reference)
    return counter.frame_count


@names
def test_blocks_of_a_kind_are_compiled_once(name):
    # FLUX.1's single block twice, as its first input has other strides.
    assert graphs(name, True) == graphs(name, False) == {FLUX: 3, FLUX2: 2}[name]


def compiled(group: Group, name: str, train: bool) -> None:
    torch._dynamo.reset()
    model, eager = fused(name, group), fused(name, group)
    model.compile(fullgraph=True, backend="aot_eager")
    grads = []
    for each in (model, eager):
        with torch.set_grad_enabled(train):
            (y,) = each(**FAMILIES[name].inputs(), return_dict=False)
        if train:
            y.square().sum().backward()
        grads.append([y.detach(), *(it.grad for it in each.parameters() if it.grad is not None)])
    assert len(grads[0]) == len(grads[1]) and len(grads[0]) > 20 * train
    assert all(relative_error(*pair) <= FLOAT32 for pair in zip(*grads, strict=True))


@pytest.mark.parametrize("train", [False, pytest.param(True, marks=pytest.mark.slow)])
@names
def test_a_fused_model_is_one_graph_and_equals_eager(ranks, name, train):
    ranks(2, compiled, name, train)
