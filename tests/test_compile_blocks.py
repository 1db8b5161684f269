"""diffusers' regional compilation, and a model compiled whole: one graph each, on ranks that then agree with one.

`aot_eager` traces as inductor would, and needs no C++ compiler to run.
"""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import tp_layers
from close import FLOAT32, relative_error
from families import REGISTERED, digest, run
from tp_layers.group import Group

# How many graphs there are of a whole model's blocks, too: one for each kind of block, and one more where the first of
# a kind gets an input of other strides.
GRAPHS = {
    "FluxTransformer2DModel": 3,
    "Flux2Transformer2DModel": 2,
    "QwenImageTransformer2DModel": 1,
    "WanTransformer3DModel, text to video": 1,
}


def compiled(group: Group, label: str, by_block: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    model = tp_layers.apply(REGISTERED[label].build(), group=group)
    counter = CompileCounterWithBackend("aot_eager")
    if by_block:
        model.compile_repeated_blocks(fullgraph=True, backend=counter)
    else:
        model.compile(fullgraph=True, backend=counter)
    twice = [run(model, REGISTERED[label].inputs()) for _ in range(2)]
    assert digest(twice[0]) == digest(twice[1])
    return {"outputs": twice[0], "bits": digest(twice[0]), "graphs": counter.frame_count}


@pytest.mark.parametrize("by_block", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["blocks", "whole"])
@pytest.mark.parametrize("label", GRAPHS)
def test_a_compiled_sharded_model_equals_one_rank(ranks, label, by_block):
    wanted = run(REGISTERED[label].build(), REGISTERED[label].inputs())
    found = ranks(2, compiled, label, by_block)
    assert found[0]["bits"] == found[1]["bits"]
    assert [result["graphs"] for result in found] == [GRAPHS[label] if by_block else 1] * 2
    for got, full in zip(found[0]["outputs"], wanted, strict=True):
        assert relative_error(got, full) <= FLOAT32
