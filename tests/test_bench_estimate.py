"""The benchmark of estimates: its cases run on shards, at the tokens they are said to have, and rows are medians."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import estimate as bench
from tp_layers.estimate import estimate
from tp_layers.hardware import Hardware
from tp_layers.rows import Rows

ANY = Hardware("any", 1e9, 1e9, 1e9, 8, 1e-3, 1e9, 0.0, 1e9, (torch.float32,))


@pytest.mark.parametrize("case", ["flux2-512", "wan-512"])
def test_a_case_has_the_tokens_that_it_is_estimated_for(case):
    make, inputs, tokens = bench.CASES[case]
    model, seen = make(), {}
    for path, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and ".0." in path:
            layer.register_forward_hook(lambda _, x, y, path=path: seen.update({path: y.shape[:-1].numel()}))
    with torch.no_grad():
        model(**inputs(), return_dict=False)
    rows = Rows(model)
    assert len(seen) > 5 and seen == {path: tokens.of(rows.kind(path)) for path in seen}
    assert [step.size for step in estimate(model, ANY, tokens, sizes=bench.SIZES).steps] == list(bench.SIZES)


def test_a_case_is_timed_on_its_shards(ranks):
    ranks(2, bench.prepare, "wan-512")
    assert all(seconds > 0 for seconds in ranks(2, bench.timed, "wan-512"))


def test_a_row_holds_medians_of_the_rounds():
    model, _, tokens = bench.CASES["wan-512"]
    (step,) = estimate(model(), ANY, tokens, sizes=[2]).steps
    steps = [replace(step, gemms=gemms, attention=0.5, collectives=0.25) for gemms in (0.25, 1.25, 3.25)]
    row = bench.row("wan-512", 2, list(zip(steps, (2.0, 1.0, 4.0), strict=True)))
    # Estimated 1, 2 and 4 seconds.
    assert (row["step_ms"], row["estimate_ms"], row["gemms_ms"], row["collectives_ms"]) == (2000, 2000, 1250, 250)
    assert (row["ratio"], row["low"], row["high"], row["size"]) == (1.0, 0.5, 2.0, 2)
