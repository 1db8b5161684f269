"""`describe`: bytes per rank, what stays whole and the collectives of a call, from shapes alone, exact to the byte."""

from typing import Any

import pytest
import torch
from torch import nn

import tp_layers
from tp_layers import Divide, PackedColwiseParallel, PackedRowwiseParallel, ShardParameter
from tp_layers.describe import Collective, Report, describe
from tp_layers.group import Group
from tp_layers.plans.spec import ShardSpec


class Block(nn.Module):
    """Ten tensors whose bytes are worked out by hand below."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = 12
        self.qkv = nn.Linear(8, 36)
        self.norm = nn.RMSNorm(12)
        self.out = nn.Linear(12, 8)
        self.gate = nn.Linear(8, 24, bias=False)
        self.whole = nn.Linear(8, 8)
        self.whole.bias = self.out.bias
        self.sinks = nn.Parameter(torch.zeros(12, 2))
        self.register_buffer("steps", torch.zeros(5, dtype=torch.int64))
        self.register_buffer("table", torch.zeros(100), persistent=False)


class Model(nn.Module):
    """Two blocks, and a head in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 10, dtype=torch.bfloat16)


PLAN: dict[str, Any] = {
    "blocks.*": Divide("heads"),
    "blocks.*.qkv": PackedColwiseParallel([1, 1, 1]),
    "blocks.*.norm": "rms_norm",
    "blocks.*.out": PackedRowwiseParallel([1, 2]),
    "blocks.*.gate": "colwise_gather",
    "blocks.*.sinks": ShardParameter(0),
    "head": "rowwise_split_input",
}

# By hand, of one block in bytes: what is cut, and what is not. The two biases are tied, and the table is not stored.
CUT = {"qkv.weight": 8 * 36 * 4, "qkv.bias": 36 * 4, "norm.weight": 12 * 4, "out.weight": 12 * 8 * 4}
CUT |= {"gate.weight": 8 * 24 * 4, "sinks": 12 * 2 * 4}
WHOLE = {"out.bias": 8 * 4, "whole.weight": 8 * 8 * 4, "steps": 5 * 8}
HEAD_CUT, HEAD_WHOLE = 8 * 10 * 2, 10 * 2


def meta(model_class: Any) -> nn.Module:
    with torch.device("meta"):
        return model_class()


@pytest.mark.parametrize("size", [1, 2, 4], ids=["one rank", "two ranks", "four ranks"])
@pytest.mark.parametrize("where", ["in memory", "on meta"])
def test_bytes_worked_out_by_hand(size, where):
    report = describe(Model() if where == "in memory" else meta(Model), PLAN, size=size)
    assert (report.model, report.size, report.notes, report.sizes) == ("Model", size, [], [1, 2, 4])
    cut, whole = 2 * sum(CUT.values()) + HEAD_CUT, 2 * sum(WHOLE.values()) + HEAD_WHOLE
    assert (report.full_bytes, report.whole_bytes, report.held_bytes) == (cut + whole, whole, cut // size + whole)
    tensors = {tensor.name: tensor for tensor in report.tensors}
    assert len(report.tensors) == len(tensors) == 2 * (len(CUT) + len(WHOLE)) + 2
    for name, nbytes in CUT.items():
        tensor = tensors[f"blocks.1.{name}"]
        assert tensor.spec is not None and (tensor.full_bytes, tensor.held_bytes) == (nbytes, nbytes // size)
    for name, nbytes in WHOLE.items():
        tensor = tensors[f"blocks.1.{name}"]
        assert tensor.spec is None and tensor.full_bytes == tensor.held_bytes == nbytes
    qkv = tensors["blocks.0.qkv.weight"]
    assert (qkv.shape, qkv.local_shape, qkv.itemsize) == ((36, 8), (36 // size, 8), 4)
    assert qkv.spec == ShardSpec(0, (12, 12, 12)) and tensors["blocks.0.out.weight"].spec == ShardSpec(1, (4, 8))


def test_collectives_of_one_call():
    # An all-reduce carries a row of the output: 8 float32 of each `out`, 10 bfloat16 of the head.
    counted = describe(Model(), PLAN, size=2).collectives
    assert {item.kind: item for item in counted} == {
        "all-gather": Collective("all-gather", 2, 2 * 24 * 4),
        "all-reduce": Collective("all-reduce", 3, 2 * 8 * 4 + 10 * 2),
        "all-reduce of squares": Collective("all-reduce of squares", 2, 2 * 4),
    }
    assert describe(Model(), PLAN, size=4).collectives == counted
    assert describe(Model(), PLAN, size=1).collectives == []
    sharded = tp_layers.apply(meta(Model), PLAN, group=Group(1, 2))
    assert describe(sharded).collectives == counted


def test_styles_are_named_as_in_a_plan():
    styles = describe(Model(), PLAN, size=2).styles
    assert styles["blocks.1"] == "Divide('heads')" and styles["head"] == "rowwise_split_input"
    assert styles["blocks.0.norm"] == "rms_norm" and styles["blocks.0.gate"] == "colwise_gather"
    assert styles["blocks.0.qkv"] == "PackedColwiseParallel(blocks=[1, 1, 1])"


def test_the_largest_whole_tensors_are_summed_over_blocks():
    largest = describe(Model(), PLAN, size=2).largest_whole()
    # out.bias, the first name of the tied pair, stands for both.
    assert largest == [
        ("blocks.*.whole.weight", 2 * 8 * 8 * 4), ("blocks.*.steps", 2 * 5 * 8), ("blocks.*.out.bias", 2 * 8 * 4),
        ("head.bias", 20),
    ]  # fmt: skip


def test_only_the_largest_whole_tensors_are_listed():
    model = nn.ModuleDict({f"layer{number}": nn.Linear(4, 4 + number, bias=False) for number in range(10)})
    model["cut"] = nn.Linear(4, 4)
    report = describe(model, {"cut": "colwise_gather"}, size=2)
    assert [name for name, _ in report.largest_whole()] == [f"layer{number}.weight" for number in range(9, 3, -1)]


def test_the_model_is_left_as_it_was():
    model = Model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    versions = {name: tensor._version for name, tensor in model.state_dict(keep_vars=True).items()}
    modules = dict(model.named_modules())
    describe(model, PLAN, size=2)
    assert dict(model.named_modules()) == modules and model.blocks[0].heads == 12
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert {name: tensor._version for name, tensor in model.state_dict(keep_vars=True).items()} == versions


def test_what_nobody_takes_split_is_noted_if_it_is_not_checked():
    plan = {"blocks.*.qkv": "colwise"}
    with pytest.raises(ValueError, match=r"the output of 'blocks\.0\.qkv' is split, .*; pass check=False if that is"):
        describe(Model(), plan, size=2)
    report = describe(Model(), plan, size=2, check=False)
    assert len(report.notes) == 2 and all("takes a split input" in note for note in report.notes)
    assert "'blocks.0.qkv'" in report.notes[0] and "'blocks.1.qkv'" in report.notes[1]
    assert all(f"note: {note}" in str(report) for note in report.notes)
    assert describe(tp_layers.apply(meta(Model), plan, group=Group(0, 2), check=False)).notes == report.notes


def test_the_size_is_needed():
    with pytest.raises(ValueError, match="describe needs size=, the number of ranks"):
        describe(Model(), PLAN)


def test_a_plan_that_does_not_fit_is_refused():
    with pytest.raises(ValueError, match=r"a block of 4 is not divisible by 3 ranks; sizes that work .*: 1, 2, 4$"):
        describe(Model(), PLAN, size=3)
    with pytest.raises(ValueError, match="the plan key 'nothing' matches nothing in Model"):
        describe(Model(), {"nothing": "colwise"}, size=2)
    with pytest.raises(ValueError, match="no plan for Model: pass plan="):
        describe(Model(), size=2)


def test_a_sharded_model_takes_no_plan_and_no_other_size():
    sharded = tp_layers.apply(meta(Model), PLAN, group=Group(0, 2))
    for arguments in ({"plan": PLAN}, {"size": 4}, {"plan": PLAN, "size": 2}):
        with pytest.raises(ValueError, match=r"sharded over 2 ranks already: describe\(model\) says how"):
            describe(sharded, **arguments)
    assert describe(sharded, size=2) == describe(sharded)


def test_the_text_holds_the_numbers():
    report = describe(Model(), PLAN, size=2)
    text = str(report)
    for line in (
        "Model over 2 ranks (sizes that work: 1, 2, 4)",
        "full model       6.02 kB, 20 tensors, 13 of them sharded",
        "each rank holds  3.35 kB, 55.6% of the model",
        "whole everywhere 676 B, 11.2% of the model",
        "8.5%  blocks.*.whole.weight",
        "0.3%  head.bias",
        "3 x all-reduce, 84 bytes per row in all",
        "2 x all-reduce of squares, 8 bytes per row in all",
        "2 x all-gather, 192 bytes per row in all",
    ):
        assert line in text, text
    assert "note" not in text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (1_234_567, "1.23 MB"), (64_446_562_304, "64.45 GB")],
    ids=["nothing", "bytes", "kilobytes", "megabytes", "gigabytes"],
)
def test_the_text_counts_in_powers_of_ten(nbytes, text):
    model = nn.Module()
    model.register_buffer("x", torch.empty(nbytes, dtype=torch.uint8, device="meta"))
    tensors = describe(nn.ModuleDict({"x": model, "y": nn.Linear(2, 2)}), {"y": "colwise_gather"}, size=1).tensors
    report = Report("Model", 1, [tensor for tensor in tensors if tensor.name == "x.x"], {}, [], [1], [])
    assert f"full model       {text}, 1 tensors, 0 of them sharded" in str(report)
