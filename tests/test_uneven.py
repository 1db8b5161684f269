"""By what a plan is cut where the size does not divide it: which lengths go by heads, and what is refused."""

import pytest
import torch
from torch import nn

import tp_layers
from close import randomise
from families import FAMILIES
from refused import refused
from tp_layers import Divide, PackedColwiseParallel, PackedRowwiseParallel, ShardParameter, SliceOutput
from tp_layers.group import Group
from tp_layers.plans.match import match
from tp_layers.plans.registry import plan_for
from tp_layers.plans.resolve import resolve
from tp_layers.plans.style import Style

# Of six heads of 16 channels on four ranks: 2, 2, 1, 1.
BY_HEADS = [32, 32, 16, 16]


def on_meta(name, heads):
    with torch.device("meta"):
        return FAMILIES[name].make(heads)


def extents(name, heads, size, **choice):
    """What each rank holds of each sharded parameter, by its name."""
    model = on_meta(name, heads)
    resolved = resolve(model, plan_for(model, **choice), size, uneven=True)
    return resolved, {key: [spec.extent(rank, size) for rank in range(size)] for key, spec in resolved.specs.items()}


def by_blocks(resolved, key, size):
    """Of each rank: the lengths of its parts of every block."""
    return [[stop - start for start, stop, _ in resolved.specs[key].ranges(rank, size)] for rank in range(size)]


def test_attention_goes_by_heads_and_the_feed_forward_by_equal_parts_where_they_are():
    _, held = extents("QwenImageTransformer2DModel", 6, 4)
    block = "transformer_blocks.0"
    for key in ("to_q", "to_k", "to_v", "add_q_proj", "to_out.0", "to_add_out"):
        assert held[f"{block}.attn.{key}.weight"] == BY_HEADS, key
    # 384 wide.
    assert held[f"{block}.img_mlp.net.0.proj.weight"] == held[f"{block}.img_mlp.net.2.weight"] == [96] * 4


def test_an_mlp_in_one_weight_with_attention_goes_by_heads():
    resolved, held = extents("FluxTransformer2DModel", 6, 4)
    block = "single_transformer_blocks.1"
    out = by_blocks(resolved, f"{block}.proj_out.weight", 4)
    assert out == [[32, 128], [32, 128], [16, 64], [16, 64]]
    # Four divides its 384, but its reader takes it by heads.
    assert held[f"{block}.proj_mlp.weight"] == [mlp for _, mlp in out] and held[f"{block}.attn.to_v.bias"] == BY_HEADS
    assert held["transformer_blocks.0.ff.net.0.proj.weight"] == [96] * 4


def test_a_fused_projection_keeps_the_ratio_of_attention_to_mlp():
    resolved, _ = extents("Flux2Transformer2DModel", 6, 4)
    block = "single_transformer_blocks.0.attn"
    fused = by_blocks(resolved, f"{block}.to_qkv_mlp_proj.weight", 4)
    out = by_blocks(resolved, f"{block}.to_out.weight", 4)
    for rank, heads in enumerate((2, 2, 1, 1)):
        assert fused[rank] == [16 * heads] * 3 + [48 * heads] * 2 and out[rank] == [16 * heads, 48 * heads]


def test_norms_tables_and_counts_follow():
    _, held = extents("LTXVideoTransformer3DModel", 6, 4)
    assert held["transformer_blocks.0.attn1.norm_k.weight"] == held["transformer_blocks.1.attn2.to_q.bias"] == BY_HEADS
    for rank, heads in enumerate((2, 2, 1, 1)):
        model = tp_layers.apply(on_meta("LTXVideoTransformer3DModel", 6), group=Group(rank, 4), uneven=True)
        assert model.transformer_blocks[0].attn1.heads == heads


def test_a_modulation_needs_no_heads():
    _, held = extents("FluxTransformer2DModel", 6, 4, modulation="sharded")
    assert held["single_transformer_blocks.0.norm.linear.weight"] == [3 * 96 // 4] * 4
    # 3 x 112 is no multiple of five nor of 64, but of eight.
    _, held = extents("FluxTransformer2DModel", 7, 5, modulation="sharded")
    assert held["single_transformer_blocks.0.norm.linear.weight"] == [72, 72, 64, 64, 64]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_size_that_divides_is_as_it_was(name):
    model = on_meta(name, 4)
    for size in (1, 2, 4):
        even, uneven = (resolve(model, plan_for(model), size, uneven=it) for it in (False, True))
        assert even.specs == uneven.specs and all(spec.granules is None for spec in uneven.specs.values())
        assert (even.uneven, uneven.uneven) == (False, True)
        assert even.sizes == [1, 2, 4] and uneven.sizes == [1, 2, 3, 4]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_size_that_does_not_divide_is_refused_with_what_would_help(name):
    model, sizes = on_meta(name, 6), "sizes that work for this plan: 1, 2, 3"
    for size, uneven, message in (
        (4, False, f"is not divisible by 4 ranks; {sizes}, 6; uneven=True lets 4 ranks hold unequal parts$"),
        (8, False, f"is not divisible by 8 ranks; {sizes}, 6$"),
        (8, True, f"its 6 heads are fewer than 8 ranks; {sizes}, 4, 5, 6$"),
    ):
        with pytest.raises(ValueError, match=message):
            tp_layers.apply(model, group=Group(0, size), uneven=uneven)
    assert "_tp_layers" not in vars(model)


class Toy(nn.Module):
    """Attention of five heads of two channels, an MLP of 14, and a table and parameters of heads or channels."""

    def __init__(self, heads=5):
        super().__init__()
        self.attn, self.rope = nn.Module(), nn.Identity()
        self.attn.heads, self.attn.inner_dim, self.attn.rank = heads, 2 * heads, 6
        self.attn.to_q, self.attn.to_out = nn.Linear(8, 2 * heads), nn.Linear(2 * heads, 8)
        self.attn.norm = nn.RMSNorm(2 * heads)
        self.attn.low, self.attn.back = nn.Linear(8, 6), nn.Linear(6, 8)
        self.sinks, self.scale, self.other = (nn.Parameter(torch.ones(length)) for length in (heads, 14, 9))
        self.up, self.down, self.gather = nn.Linear(8, 14), nn.Linear(14, 8), nn.Linear(8, 10)
        self.both, self.mlp = nn.Linear(2 * heads + 20, 8), nn.Linear(8, 20)


ATTENTION = {"attn.to_q": "colwise", "attn.to_out": "rowwise"}
MLP = {"up": "colwise", "down": "rowwise"}
RULES = {
    "heads of a module": ({**ATTENTION, "attn": Divide("heads", "inner_dim")}, {"attn.to_q.weight": (5,)}),
    "a norm across heads": ({**ATTENTION, "attn.norm": "rms_norm"}, {"attn.norm.weight": (5,)}),
    "a parameter of heads": ({**ATTENTION, "sinks": ShardParameter(0)}, {"sinks": (5,)}),
    "a width without a factor of the heads": ({**ATTENTION, **MLP}, {"up.weight": (14,), "down.weight": (14,)}),
    "a parameter of that width": ({**ATTENTION, **MLP, "scale": ShardParameter(0)}, {"scale": (14,)}),
    "an MLP in one weight with attention": (
        {"attn.to_q": "colwise", "mlp": "colwise", "both": PackedRowwiseParallel([1, 2])},
        {"both.weight": (5, 5), "mlp.weight": (5,), "mlp.bias": (5,)},
    ),
    "an MLP by itself": ({"mlp": PackedColwiseParallel([1, 1]), "attn.to_out": "rowwise"}, {"mlp.weight": (10, 10)}),
    "from whole to whole": ({**ATTENTION, "gather": "colwise_gather"}, {"gather.weight": (10,), "gather.bias": (10,)}),
    "a model without heads": (MLP, {"up.weight": (14,), "down.weight": (14,)}),
}


@pytest.mark.parametrize(("plan", "granules"), RULES.values(), ids=RULES)
def test_into_how_many_pieces_a_length_is_cut(plan, granules):
    specs = resolve(Toy(), plan, 3, uneven=True, check=False).specs
    assert {name: specs[name].granules for name in granules} == granules


@pytest.mark.parametrize(("width", "granules"), [(96, 6), (72, 9), (66, 6), (448, 7), (67, 67)])
def test_an_mlp_is_cut_by_heads_where_the_parts_are_of_a_width_that_a_gemm_takes(width, granules):
    # Multiples of eight, else of heads, else of any number: 96 = 6 x 16, 72 = 9 x 8, 66 = 6 x 11, 448 = 7 x 64.
    model = Toy(6)
    model.up, model.down = nn.Linear(8, width), nn.Linear(width, 8)
    assert resolve(model, {**ATTENTION, **MLP}, 5, uneven=True).specs["up.weight"].granules == (granules,)


UNKNOWN = {
    "a projection of attention without a factor of its heads": (
        {**ATTENTION, "attn.low": "colwise", "attn.back": "rowwise"},
        4,
        ["'attn.low': 6 does not consist of 5 heads, nor is it divisible by 4 ranks"],
    ),
    "a parameter that is neither of heads nor of a projection": (
        {**ATTENTION, "other": ShardParameter(0)},
        4,
        ["'other': 9 is not divisible by 4 ranks, and it is not known by whose heads to cut it"],
    ),
    "a count of anything": ({**ATTENTION, "attn": Divide("rank")}, 4, ["'attn': 6 does not consist of 5 heads"]),
    "fewer rows than ranks": ({"up": "colwise", "down": "rowwise"}, 15, ["'up': 14 is not divisible by 15 ranks"]),
}


@pytest.mark.parametrize(("plan", "size", "message"), UNKNOWN.values(), ids=UNKNOWN)
def test_what_is_not_known_is_refused(plan, size, message):
    model = Toy()
    with refused(model, *message):
        tp_layers.apply(model, plan, group=Group(0, size), uneven=True)
    # No hint at what would not help.
    with pytest.raises(ValueError, match="is not divisible by") as raised:
        resolve(model, plan, size)
    assert "uneven" not in str(raised.value)


def test_a_table_beside_attention_of_several_head_counts_is_refused():
    model = nn.ModuleDict({"one": Toy(5), "other": Toy(10), "rope": nn.Identity()})
    plan = {f"*.{key}": style for key, style in ATTENTION.items()}
    assert len(resolve(model, plan, 4, uneven=True).specs) == 6
    with refused(model, "'rope': it stands beside attention modules of [5, 10] heads"):
        tp_layers.apply(model, {**plan, "rope": SliceOutput(-1)}, group=Group(0, 4), uneven=True)


class Stubborn(Style):
    """A style of one's own, that knows nothing of granules."""

    input, output = "whole", "split"

    def specs(self, module):
        return {"weight": tp_layers.plans.spec.ShardSpec.of(0, len(module.weight))}


def test_a_style_that_cannot_be_cut_unevenly_is_refused():
    model, plan = Toy(), {"up": Stubborn(), "down": "rowwise"}
    assert resolve(model, plan, 2).sizes == [1, 2, 7, 14] == resolve(model, plan, 7, uneven=True).sizes
    with refused(model, "'up': Stubborn cannot be cut unevenly"):
        tp_layers.apply(model, plan, group=Group(0, 4), uneven=True)


class Counting(Style):
    """A style of one's own, with a count that the size must divide."""

    def counts(self, module):
        return {"number of groups": 6}


def test_a_count_that_no_style_cuts_must_divide_whatever_is_uneven():
    model, plan = Toy(), {"up": "colwise", "down": "rowwise", "mlp": Counting()}
    assert resolve(model, plan, 3, uneven=True).sizes == [1, 2, 3, 6]
    with refused(model, "'mlp': its number of groups of 6 is not divisible by 4 ranks, nor does its style cut it"):
        tp_layers.apply(model, plan, group=Group(0, 4), uneven=True)


def test_a_cut_style_is_still_what_a_plan_calls_it():
    model = randomise(Toy())
    styles = tp_layers.describe(model, {**ATTENTION, **MLP}, size=3, uneven=True).styles
    assert styles == {"attn.to_q": "colwise", "attn.to_out": "rowwise", "up": "colwise", "down": "rowwise"}
    assert all(item.style.granules is None for item in match(model, ATTENTION))
