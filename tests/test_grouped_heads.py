"""Fewer kv heads than ranks, or not divisible by them: each rank has the kv heads that its query heads read."""

import copy

import pytest
import torch
from torch import nn

import tp_layers
from close import randomise, relative_error
from grouped import WIDTH, Counted, Grouped, Table, Told, plan
from refused import refused
from seeded import noise
from tp_layers import Divide, ShardParameter, SliceOutput
from tp_layers.group import Group
from tp_layers.plans.resolve import resolve
from tp_layers.plans.shard import sharding_of
from tp_layers.verify import verify

LIMIT = 1e-12
KINDS = {"counted": Counted, "told": Told}
# Query heads, kv heads, ranks, and whether the ranks hold unequal numbers of query heads.
CASES = {
    "two kv heads for four ranks": (4, 2, 4, False),
    "one kv head for four ranks": (8, 1, 4, False),
    "one kv head for each rank": (6, 3, 3, False),
    "three kv heads for two ranks": (6, 3, 2, True),
    "one kv head and three query heads": (3, 1, 2, True),
    "four kv heads for three ranks": (8, 4, 3, True),
    "as many kv heads": (6, 6, 4, True),
}
cases = pytest.mark.parametrize(("heads", "kv_heads", "size", "uneven"), CASES.values(), ids=CASES)
kinds = pytest.mark.parametrize("kind", KINDS)


def build(kind, heads, kv_heads):
    return randomise(Grouped(KINDS[kind], heads, kv_heads)).double()


def backward(model, call=None):
    """The output, and the gradients after two calls."""
    for seed in (1, 2):
        x = noise(2, 5, 14, seed=seed, dtype=torch.float64)
        y = (model if call is None else call)(x)
        y.backward(noise(*y.shape, seed=seed + 2, dtype=torch.float64))
    return y.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def errors(group, kind, heads, kv_heads, uneven):
    """How far the output and each gradient are off, of the model and of a copy of it."""
    wanted, full = backward(build(kind, heads, kv_heads))
    model = build(kind, heads, kv_heads)
    tp_layers.apply(model, plan(KINDS[kind], feed_forward=uneven), group=group, uneven=uneven)
    specs, found = sharding_of(model).resolved.specs, {}
    for name, one in (("model", model), ("copy", copy.deepcopy(model))):
        y, grads = backward(one)
        found[name] = relative_error(y, wanted)
        for key, grad in grads.items():
            share = specs[key].take(full[key], group.rank, group.size) if key in specs else full[key]
            found[f"{name}: {key}"] = relative_error(grad, share)
    return found, y.tolist(), len(specs)


@cases
@kinds
def test_output_and_every_gradient_are_those_of_one_device(ranks, kind, heads, kv_heads, size, uneven):
    results = ranks(size, errors, kind, heads, kv_heads, uneven)
    for found, y, count in results:
        assert {name: error for name, error in found.items() if not error <= LIMIT} == {}
        assert y == results[0][1] and count == 2 * (13 if uneven else 10) and len(found) == 2 * (1 + 2 * 16)


def compiled(group):
    """How far the first call of a compiled model, and the gradients after it, are from those of an eager one."""
    found = []
    for graph in (False, True):
        model = build("told", 3, 1)
        tp_layers.apply(model, plan(Told), group=group, uneven=True)
        one = torch.compile(model, fullgraph=True, backend="aot_eager") if graph else model
        found.append(backward(model, one))
    (y, eager), (z, grads) = found
    return [relative_error(z, y), *(relative_error(grads[name], eager[name]) for name in eager)]


@pytest.mark.slow
def test_compiled_it_is_one_graph_with_the_same_gradients(ranks):
    for found in ranks(2, compiled):
        assert max(found) <= LIMIT and len(found) == 33


@cases
@kinds
def test_every_part_of_it_matters(kind, heads, kv_heads, size, uneven):
    """A wrong shard of any parameter would show in the output."""
    model, x = build(kind, heads, kv_heads), noise(2, 5, 14, dtype=torch.float64)
    specs = resolve(model, plan(KINDS[kind], uneven), size, uneven=uneven).specs
    wanted, parameters = model(x), dict(model.named_parameters())
    for name, spec in specs.items():
        kept = parameters[name].detach().clone()
        with torch.no_grad():
            parameters[name].copy_(kept.roll(1, spec.dim))
            assert relative_error(model(x), wanted) > 1e-6, name
            parameters[name].copy_(kept)


def test_what_each_rank_of_four_holds_of_two_kv_heads():
    resolved = resolve(build("told", 4, 2), plan(Told, feed_forward=False), 4)
    specs = {name.removeprefix("blocks.0.attn."): spec for name, spec in resolved.specs.items()}
    assert [specs["to_q.weight"].ranges(rank, 4)[0][:2] for rank in range(4)] == [(0, 5), (5, 10), (10, 15), (15, 20)]
    for name in ("to_k.weight", "to_k.bias", "to_v.weight", "norm_k.weight", "more.shift"):
        assert [specs[name].ranges(rank, 4)[0][:2] for rank in range(4)] == [(0, 5), (0, 5), (5, 10), (5, 10)], name
    assert specs["to_k.weight"].granules == (2,) and specs["to_q.weight"].granules is None
    assert resolved.sizes == [1, 2, 4] and not resolved.uneven


def test_query_heads_stay_with_the_kv_head_they_read():
    # Six query heads are three to a rank, but two read each of three kv heads: four and two.
    specs = resolve(build("counted", 6, 3), plan(Counted), 2, uneven=True).specs
    assert [specs["blocks.1.attn.to_q.weight"].extent(rank, 2) for rank in (0, 1)] == [20, 10]
    assert [specs["blocks.1.attn.to_k.weight"].extent(rank, 2) for rank in (0, 1)] == [10, 5]
    assert [specs["blocks.1.attn.to_out.weight"].extent(rank, 2) for rank in (0, 1)] == [20, 10]


def test_memory_is_that_of_the_heads_each_rank_holds():
    model = build("told", 4, 2)
    report = tp_layers.describe(model, plan(Told, feed_forward=False), size=4)
    held = {tensor.name: tensor.held_bytes for tensor in report.tensors}
    # One kv head of five channels, of 14 columns in float64.
    assert held["blocks.0.attn.to_k.weight"] == 5 * 14 * 8 == held["blocks.0.attn.to_q.weight"]
    sharded = tp_layers.apply(build("told", 4, 2), plan(Told, feed_forward=False), group=Group(2, 4))
    assert tp_layers.describe(sharded) == report and report.is_even
    assert report.held_bytes == sum(tensor.numel() * 8 for tensor in sharded.state_dict().values())


REFUSED = {
    "query heads of two kv heads on one rank": (
        6, 2, 4, True,
        ["query heads 2 to 3 of 6, those of rank 1 of 4, read more than one of the 2 kv heads", "plan: 1, 2, 6"],
    ),
    "kv heads shared unevenly": (8, 2, 3, True, ["its 2 kv heads are not shared evenly by 3 ranks"]),
    "fewer heads than ranks": (3, 1, 4, True, ["its 3 heads are fewer than 4 ranks", "work for this plan: 1, 2, 3"]),
    "a length that may be of either": (5, 1, 2, True, ["5 is both the number of heads and the width of the kv"]),
    "unequal parts that were not asked for": (
        6, 3, 2, False,
        ["not divisible by 2 ranks", "work for this plan: 1, 3, 6; uneven=True lets 2 ranks hold unequal parts"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("heads", "kv_heads", "size", "uneven", "message"), REFUSED.values(), ids=REFUSED)
def test_sizes_at_which_a_rank_would_lack_a_head_are_refused(heads, kv_heads, size, uneven, message):
    model = build("told", heads, kv_heads)
    with refused(model, *message):
        tp_layers.apply(model, plan(Told, feed_forward=False), group=Group(0, size), uneven=uneven)


def test_attention_that_repeats_in_a_way_of_its_own_is_refused():
    model = build("told", 4, 2)
    model.blocks[1].attn.num_key_value_groups = 1
    with refused(model, "'blocks.1.attn' repeats 2 kv heads 1 times for 4 heads", "ranks cannot share them"):
        tp_layers.apply(model, plan(Told, feed_forward=False), group=Group(0, 4))


def test_kv_heads_that_no_projection_has_are_refused():
    model = build("told", 4, 2)
    for block in model.blocks:
        block.attn.kv_heads = block.attn.num_key_value_groups = 1
    message = (
        "kv_heads of 1 is not divisible by 2 ranks, and ranks cannot share kv heads",
        "the width of its 1 kv heads",
    )
    with refused(model, *message):
        tp_layers.apply(model, plan(Counted, feed_forward=False), group=Group(0, 2))


def verified(group, kind, heads, kv_heads, wrong):
    model, chosen = build(kind, heads, kv_heads).float(), plan(KINDS[kind])
    if wrong:
        chosen.pop("blocks.*.attn")
    return verify(model, noise(2, 5, 14), chosen, group=group, uneven=True)


def test_verify_compares_unequal_parts_and_names_what_is_wrong(ranks):
    for kind, heads, kv_heads, size in (("told", 4, 2, 4), ("counted", 6, 3, 2), ("counted", 6, 6, 4)):
        for found in ranks(size, verified, kind, heads, kv_heads, False):
            assert found.ok and found.identical and found.error < 1e-6 and len(found.layers) > 20
    found = ranks(4, verified, "counted", 8, 2, True)[0]
    assert not found.ok and found.first_wrong.path.startswith("blocks.0.attn")


class Mixed(nn.Module):
    """Attention of eight query and two kv heads, and experts as wide as keys are."""

    def __init__(self):
        super().__init__()
        self.rope, self.attn, self.moe = Table(8), Counted(8, 2), nn.Module()
        self.moe.up, self.moe.down = (nn.Parameter(torch.ones(3, *it)) for it in ((WIDTH, 10), (10, WIDTH)))


MIXED = {
    "attn": Divide("heads", "kv_heads"),
    **{f"attn.to_{name}": "colwise" for name in "qkv"},
    "attn.to_out": "rowwise",
    "attn.norm_k": "rms_norm",
    "attn.gate": ShardParameter(0),
    "attn.more.shift": ShardParameter(1),
    "rope": SliceOutput(-1),
    "moe": "all_reduce_output",
    "moe.up": ShardParameter(2),
    "moe.down": ShardParameter(1, partial=True),
}


def test_experts_as_wide_as_shared_keys_are_not_shared():
    resolved = resolve(Mixed(), MIXED, 4, uneven=True)
    assert resolved.specs["attn.to_k.weight"].copies(4) == 2
    for key in ("moe.up", "moe.down"):
        assert [resolved.specs[key].extent(rank, 4) for rank in range(4)] == [3, 3, 2, 2]


def test_what_shared_keys_would_enter_twice_is_refused():
    model = Mixed()
    model.attn.back = nn.Linear(10, WIDTH)
    message = "key 'attn.back' at 'attn.back': [10] in [2] granules over 4 ranks: 2 of them would hold and sum"
    with refused(model, message):
        resolve(model, MIXED | {"attn.back": "rowwise"}, 4, uneven=True)
