"""VocabParallelEmbedding: the rows and the gradients of the full table, exactly, and the tables it refuses."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

import tp_layers
from calls import Calls
from tp_layers.describe import Collective, describe
from tp_layers.group import Group
from tp_layers.layers.embedding import VocabParallelEmbedding
from tp_layers.layers.options import Options

ROWS, WIDTH = 24, 5
TABLES = {
    "plain": lambda: nn.Embedding(ROWS, WIDTH),
    "padded in the first shard": lambda: nn.Embedding(ROWS, WIDTH, padding_idx=0),
    "padded in a later shard": lambda: nn.Embedding(ROWS, WIDTH, padding_idx=-5),
    "sparse gradients": lambda: nn.Embedding(ROWS, WIDTH, sparse=True),
    "scaled by a buffer": lambda: Gemma3TextScaledWordEmbedding(ROWS, WIDTH, 0, embed_scale=WIDTH**0.5),
    "scaled by a number": lambda: BartScaledWordEmbedding(ROWS, WIDTH, 1, embed_scale=WIDTH**0.5),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_table = pytest.mark.parametrize("table", TABLES)


def full(table: str, dtype: torch.dtype = torch.float32) -> nn.Embedding:
    """A table of which every row is drawn, that of the padding too."""
    embedding = TABLES[table]().to(dtype)
    noise = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    embedding.weight.data = noise.to(dtype)
    return embedding


def ids() -> list[torch.Tensor]:
    """Ids of several shapes: every row, some rows often, one, none, a single number."""
    drawn = torch.randint(ROWS, (2, 3, 7), generator=torch.Generator().manual_seed(2))
    return [torch.arange(ROWS).flip(0), drawn, drawn.int(), drawn[:1, :1, :1], drawn[:, :0], torch.tensor(23)]


def looked_up(embedding: nn.Module) -> list[torch.Tensor]:
    """The rows of all ids, and the gradient of their sum weighted by small integers, exact in any order."""
    found = [embedding(item) for item in ids()]
    sum((rows * (torch.arange(rows.numel()) % 3).view_as(rows)).sum() for rows in found).backward()
    return [*(rows.detach() for rows in found), embedding.weight.grad.to_dense()]


def on_a_rank(group: Group, table: str, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[str], list[str]]:
    layer = VocabParallelEmbedding.from_embedding(full(table, dtype), group=group)
    with Calls() as calls:
        found = looked_up(layer)
    return found, calls.names, list(layer.state_dict())


@every_table
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_rows_and_gradients_are_those_of_the_full_table_exactly(ranks, table, size):
    # torch adds no sparse gradients in float16.
    for dtype in DTYPES[: -1 if "sparse" in table else None]:
        *rows, gradient = looked_up(full(table, dtype))
        for rank, (got, calls, keys) in enumerate(ranks(size, on_a_rank, table, dtype)):
            for mine, wanted in zip(got[:-1], rows, strict=True):
                assert mine.dtype == wanted.dtype and torch.equal(mine, wanted)
            assert torch.equal(got[-1], gradient.tensor_split(size)[rank])
            # One for each call that looks something up, and none backward.
            assert calls == ["allreduce_"] * (len(rows) - 1) * (size > 1) and keys == ["weight"]


@every_table
def test_an_id_outside_of_the_vocabulary_is_an_error_on_every_rank(table):
    for rank in range(4):
        layer = VocabParallelEmbedding.from_embedding(full(table), group=Group(rank, 4))
        for wrong in (-1, -ROWS, ROWS, ROWS + 6, 1000):
            with pytest.raises(IndexError):
                full(table)(torch.tensor([3, wrong]))
            with pytest.raises(IndexError):
                layer(torch.tensor([3, wrong]))


def in_place(group: Group, table: str) -> tuple[list[torch.Tensor], bool, str]:
    embedding = full(table)
    layer = VocabParallelEmbedding.from_embedding(embedding, group=group, options=Options(copy=False))
    with torch.no_grad():
        found = [layer(item) for item in ids()]
    with pytest.raises(ValueError) as error:
        layer(ids()[0])
    return found, layer.weight is embedding.weight, str(error.value)


@every_table
def test_a_full_table_read_in_place_is_for_inference(ranks, table):
    embedding = full(table)
    for got, holds_it, refusal in ranks(3, in_place, table):
        assert holds_it and "copy=False is for inference" in refusal
        for mine, item in zip(got, ids(), strict=True):
            assert torch.equal(mine, embedding(item))


def test_it_prints_as_the_table_does_with_the_place_of_the_shard():
    layer = VocabParallelEmbedding.from_embedding(full("padded in a later shard"), group=Group(1, 2))
    assert repr(layer) == "VocabParallelEmbedding(24, 5, padding_idx=19, rank 1 of 2, dim 0 of 24)"
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other.weight, layer.weight) and repr(other) == repr(layer)


class Centred(nn.Embedding):
    """Its rows are less their mean: no part of the table knows it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) - self.weight.mean(0)


REFUSED = {
    "no table": (lambda: nn.Linear(24, 5), "it is a Linear, not a plain nn.Embedding"),
    "a forward of its own": (lambda: Centred(24, 5), "it is a Centred, not a plain nn.Embedding"),
    "renormalised": (lambda: nn.Embedding(24, 5, max_norm=1.0), "it has max_norm or"),
    "gradients by frequency": (lambda: nn.Embedding(24, 5, scale_grad_by_freq=True), "or scale_grad_by_freq"),
    "an odd vocabulary": (lambda: nn.Embedding(23, 5), "'embed.weight' (dim 0): a block of 23 is not divisible by 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_table_is_refused(case):
    make, message = REFUSED[case]
    model: Any = nn.ModuleDict({"embed": make()})
    before = model["embed"]
    with pytest.raises(ValueError) as error:
        tp_layers.apply(model, {"embed": "embedding_rowwise"}, group=Group(0, 2))
    assert message in str(error.value) and model["embed"] is before


def test_it_is_described_as_one_all_reduce_of_a_row():
    model = nn.ModuleDict({"embed": full("plain", torch.bfloat16)})
    before = describe(model, {"embed": "embedding_rowwise"}, size=2)
    after = describe(tp_layers.apply(model, {"embed": "embedding_rowwise"}, group=Group(1, 2)))
    assert before == after and before.collectives == [Collective("all-reduce", 1, WIDTH * 2)]
    assert (before.full_bytes, before.held_bytes) == (ROWS * WIDTH * 2, ROWS * WIDTH)
