"""Estimated steps: operations and bytes worked out by hand, or counted by torch while the model runs."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import tp_layers
from families import REGISTERED, run
from tp_layers.estimate import estimate, main_dtype, sizes_of
from tp_layers.group import Group
from tp_layers.hardware import HARDWARE, Hardware, named
from tp_layers.plans.resolve import resolve
from tp_layers.rows import Rows, Tokens
from tp_layers.work import products

FLOAT = (torch.float32,)
# 4 GPUs a node. A ring over n ranks moves 2 (n - 1) / n of a tensor.
SLOW = Hardware("slow", 1e6, 1e6, 1e9, 4, 1e-3, 1e6, 5e-3, 1e5, FLOAT)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads = 8
        self.to_q, self.to_k, self.to_v = (nn.Linear(8, 16) for _ in range(3))
        self.to_out = nn.Linear(16, 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn, self.modulation = Attention(), nn.Linear(8, 24)


class Model(nn.Module):
    """One stream: what enters is the image, the blocks see both."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Linear(4, 8), nn.ModuleList([Block()])


PLAN = {f"layers.*.attn.to_{name}": "colwise" for name in "qkv"}
PLAN |= {"layers.*.attn.to_out": "rowwise", "layers.*.modulation": "colwise_gather"}
TOKENS = Tokens(10, 6)
# Multiplications and additions of one step: whole on every rank, and shared by them.
WHOLE = 2 * 10 * 4 * 8
SHARED = 2 * 16 * (3 * 8 * 16 + 16 * 8) + 2 * 1 * 8 * 24
ATTENTION = 4 * 16 * 16 * 16


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_a_step_worked_out_by_hand(size):
    (step,) = estimate(Model(), SLOW, TOKENS, sizes=[size], plan=PLAN).steps
    assert step.flops == WHOLE + (SHARED + ATTENTION) / size
    assert step.attention == pytest.approx(ATTENTION / size / 1e6)
    assert step.gemms == pytest.approx((WHOLE + SHARED / size) / 1e6)
    held = 4 * ((4 * 8 + 8 + 8) + (3 * 9 * 16 + 16 * 8 + 9 * 24) / size)
    assert step.held_bytes == held
    # The widest: q, of 8 channels and its own of 16, or the output of 8 and those.
    assert step.working_bytes == 4 * 16 * (8 + 16 // size)


@pytest.mark.parametrize(
    ("size", "nodes", "reduced", "gathered", "latency"),
    [(1, 1, 0, 0, 0), (2, 1, 1e-6, 0.5e-6, 1e-3), (4, 1, 1.5e-6, 0.75e-6, 1e-3),
     (8, 2, 1.5e-6 + 1e-5, 0.75e-6 + 0.5e-5, 6e-3)],
    ids=["one rank", "two ranks", "a node", "two nodes"],
)  # fmt: skip
def test_collectives_worked_out_by_hand(size, nodes, reduced, gathered, latency):
    (step,) = estimate(Model(), SLOW, TOKENS, sizes=[size], plan=PLAN).steps
    # 16 rows of 8 float32 are reduced, a row of 24 is gathered.
    assert step.collectives == pytest.approx(2 * latency + 16 * 32 * reduced + 96 * gathered)
    calls, payload = (2, 16 * 32 + 96) if size > 1 else (0, 0)
    assert (step.nodes, step.calls, step.payload_bytes) == (nodes, calls, payload)


def test_weights_that_take_longer_to_read_than_to_multiply():
    slow = replace(SLOW, bandwidth=1e3)
    (step,) = estimate(Model(), slow, TOKENS, sizes=[1], plan=PLAN).steps
    read = 4 * (4 * 8 + 4 * 8 * 16 + 8 * 24) / 1e3
    assert step.gemms == pytest.approx(read)


def test_no_text_no_rows_and_no_collectives_of_it():
    model = REGISTERED["FluxTransformer2DModel"].build()
    for text, collectives in ((5, "ff_context"), (0, "")):
        resolved = resolve(model, tp_layers.plan_for(model), 2)
        paths = [it.path for it in products(model, resolved, Rows(model), Tokens(6, text))]
        assert any("ff_context" in path for path in paths) is bool(collectives)
    two, one = (estimate(model, SLOW, Tokens(6, text), sizes=[2]).steps[0].calls for text in (5, 0))
    assert two > one > 0


COUNTED = {
    "FluxTransformer2DModel": (6, 5),
    "Flux2Transformer2DModel": (6, 5),
    "QwenImageTransformer2DModel": (6, 5),
    "SD3Transformer2DModel, with two attentions": (6, 5),
    "WanTransformer3DModel, text to video": (12, 5),
    "LTXVideoTransformer3DModel": (6, 5),
    "T5EncoderModel": (6, 0),
}


@pytest.mark.parametrize("label", COUNTED)
def test_torch_counts_as_many_operations(label):
    model = REGISTERED[label].build()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        run(model, REGISTERED[label].inputs())
    (step,) = estimate(model, SLOW, Tokens(*COUNTED[label]), sizes=[1]).steps
    # The inputs are a batch of two.
    assert 2 * step.flops == counter.get_total_flops()


ROWS = {
    "AuraFlowTransformer2DModel": (6, 13),
    "CogVideoXTransformer3DModel, 1.0": (12, 5),
    "CogView4Transformer2DModel": (6, 5),
    "HunyuanVideoTransformer3DModel, text": (12, 5),
    "Kandinsky5Transformer3DModel": (6, 5),
    "Lumina2Transformer2DModel": (6, 5),
    "PixArtTransformer2DModel, gated": (12, 5),
    "SanaTransformer2DModel": (24, 5),
}


@pytest.mark.parametrize("label", ROWS)
def test_planned_layers_see_as_many_rows_as_their_names_tell(label):
    model, seen = REGISTERED[label].build(), Counter()
    for path, style in resolve(model, tp_layers.plan_for(model), 2).styles.items():
        layer = model.get_submodule(path)
        if isinstance(layer, nn.Linear) and style.output is not None:
            layer.register_forward_hook(lambda _, x, y, path=path: seen.update({path: y.shape[:-1].numel()}))
    run(model, REGISTERED[label].inputs())
    rows, tokens = Rows(model), Tokens(*ROWS[label])
    assert seen and seen == {path: 2 * tokens.of(rows.kind(path)) for path in seen}


def test_norms_of_queries_and_keys_take_one_latency_as_describe_counts_them():
    model = REGISTERED["WanTransformer3DModel, text to video"].build()
    fast = replace(SLOW, link=1e18)
    (step,) = estimate(model, fast, Tokens(12, 5), sizes=[2]).steps
    found = tp_layers.describe(model, size=2).collectives
    attentions = [path for path, _ in model.named_modules() if path.endswith(".norm_q")]
    assert {item.kind: item.count for item in found}["all-reduce of squares"] == len(attentions) > 0
    assert step.calls == sum(item.count for item in found)
    assert step.collectives == pytest.approx(step.calls * fast.latency)


def test_rows_of_one_sequence_count_once():
    tokens = Tokens(10, 6)
    assert tokens.together(["both", "image", "once"]) == 16 and tokens.together(["image", "text", "image"]) == 16
    assert tokens.together(["text"]) == 6 and tokens.together(["once"]) == 0


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_up, self.down = (nn.Parameter(torch.ones(4, *shape)) for shape in ((8, 6), (3, 8)))


@pytest.mark.parametrize("packed", [False, True], ids=["modules", "one parameter"])
def test_a_row_is_computed_by_some_experts(packed):
    holder = nn.Module()
    holder.top_k, holder.experts = 2, Experts() if packed else nn.ModuleList(nn.Linear(8, 6) for _ in range(4))
    model = nn.ModuleDict({"moe": holder, "out": nn.Linear(4, 4)})
    resolved = resolve(model, {"out": "colwise_gather"}, 1)
    found = [it.flops for it in products(model, resolved, Rows(model), Tokens(10)) if it.path != "out"]
    assert sum(found) == 2 * 10 * 2 * ((8 * 6 + 3 * 8) if packed else 8 * 6)


def row_out(rows: int, width: int, columns: int, size: int):
    """A rowwise layer by itself, on an H200."""
    with torch.device("meta"):
        model = nn.ModuleDict({"out": nn.Linear(columns, width, bias=False, dtype=torch.bfloat16)})
    (step,) = estimate(model, HARDWARE["H200"], Tokens(rows), sizes=[size], plan={"out": "rowwise_split_input"}).steps
    return step


# Microseconds by arithmetic at 790 TFLOP/s, and of all-reduces over NVLink, at least and at most.
FLUX, QWEN = (4608, 3072, 15360), (4096, 3072, 12288)


@pytest.mark.parametrize(
    ("shape", "size", "gemm", "least", "most"),
    [(FLUX, 1, 550, 0, 0), (FLUX, 2, 275, 63, 94), (FLUX, 4, 138, 94, 142), (FLUX, 8, 69, 110, 165),
     (QWEN, 1, 391, 0, 0), (QWEN, 2, 196, 56, 84), (QWEN, 4, 98, 84, 126), (QWEN, 8, 49, 98, 147)],
)  # fmt: skip
def test_layers_of_published_models_are_in_the_range_of_others_figures(shape, size, gemm, least, most):
    step = row_out(*shape, size)
    assert gemm / 1.5 < 1e6 * step.gemms < 1.5 * gemm
    assert least / 1.2 <= 1e6 * step.collectives <= 1.2 * most
    # Overlap hides part of what is shorter.
    assert (step.hidden == 0) is (size == 1) and step.hidden <= min(step.gemms, step.collectives)
    assert size == 1 or step.hidden > 0.2 * min(step.gemms, step.collectives)


def test_more_of_anything_is_never_slower():
    model = REGISTERED["FluxTransformer2DModel"].build(dtype=torch.bfloat16)
    tokens, base, sizes = Tokens(4096, 512), replace(named("L40S"), per_node=2), [1, 2, 4]
    before = estimate(model, base, tokens, sizes=sizes).steps
    for name in ("flops", "bandwidth", "link", "link_between"):
        after = estimate(model, replace(base, **{name: 2 * getattr(base, name)}), tokens, sizes=sizes).steps
        assert all(new.seconds <= old.seconds for new, old in zip(after, before, strict=True))
        assert any(new.seconds < old.seconds for new, old in zip(after, before, strict=True)), name
    for old, new in pairwise(before):
        assert new.gemms < old.gemms and new.attention < old.attention and new.held_bytes < old.held_bytes
        assert new.collectives > old.collectives
    longer = estimate(model, base, Tokens(8192, 512), sizes=sizes).steps
    assert all(new.seconds > old.seconds for new, old in zip(longer, before, strict=True))
    assert [step.nodes for step in before] == [1, 1, 2]


def test_the_fastest_of_those_that_fit():
    # 3.3 kB of weights and 1.5 kB of activations on one rank, 1.7 and 1.0 on each of two.
    found = estimate(Model(), replace(SLOW, memory=4000, latency=0.0), TOKENS, sizes=[1, 2, 4], plan=PLAN)
    assert [step.fits for step in found.steps] == [False, True, True] and found.fastest is found.steps[2]
    slow = estimate(Model(), replace(SLOW, latency=1.0, flops=1e9, memory=4000), TOKENS, sizes=[1, 2, 4], plan=PLAN)
    assert slow.steps[0].seconds < slow.steps[1].seconds and slow.fastest is slow.steps[1]
    none = estimate(Model(), replace(SLOW, memory=10), TOKENS, sizes=[1, 2], plan=PLAN)
    assert none.fastest is None and str(none).count("does not fit") == 2
    edge = found.steps[2].held_bytes + found.steps[2].working_bytes
    for memory, fits in ((edge / 0.9, True), (edge, False)):
        assert estimate(Model(), replace(SLOW, memory=memory), TOKENS, sizes=[4], plan=PLAN).steps[0].fits is fits


def test_sizes_are_those_that_the_plan_allows():
    assert sizes_of(Model(), PLAN) == [1, 2, 4, 8]
    assert [step.size for step in estimate(Model(), SLOW, TOKENS, plan=PLAN).steps] == [1, 2, 4, 8]
    with pytest.raises(ValueError, match="sizes that work"):
        estimate(Model(), SLOW, TOKENS, plan=PLAN, sizes=[3])


def test_rates_of_another_dtype_and_a_sharded_model_are_refused():
    with pytest.raises(ValueError, match=r"in torch\.float32, and these rates are of bfloat16 or float16"):
        estimate(Model(), HARDWARE["H100"], TOKENS, plan=PLAN)
    half = Model().to(torch.bfloat16)
    assert main_dtype(half) == torch.bfloat16 and estimate(half, HARDWARE["H100"], TOKENS, plan=PLAN).fastest
    with pytest.raises(ValueError, match="sharded already"):
        estimate(tp_layers.apply(half, PLAN, group=Group(0, 2), check=False), HARDWARE["H100"], TOKENS)
