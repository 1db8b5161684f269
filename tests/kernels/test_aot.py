"""What the compiler makes of the shipped configurations, without a GPU: registers, spills, memory, instructions.

A subset here, every one of them under the `slow` mark.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the compiler is part of triton, which is for Linux alone")
sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import torch

import aot
from tp_layers.kernels import configs
from tp_layers.kernels.configs import Tile
from tp_layers.kernels.jit import colwise, colwise_tma, gated, gated_tma, rms_norm, rowwise, rowwise_tma

CASES = aot.cases()
TESTED = [
    case
    for case in CASES
    if case.architecture != "sm_86"
    and (case.shape == "long" or case.architecture == "sm_90")
    and (case.dtype, case.even) in (("bfloat16", True), ("float32", False))
]


def verify(case, result):
    assert result.spills == 0
    assert result.registers <= 255
    assert result.shared <= aot.SHARED[case.architecture]
    assert not result.serialised
    if case.operation not in configs.NORMS and case.dtype != "float32":
        assert result.tensor_cores > 0
        assert (result.tma if case.operation.endswith("_tma") else result.async_copies) > 0


@pytest.mark.parametrize("case", TESTED, ids=str)
def test_a_configuration_fits_its_architecture(case):
    verify(case, aot.compile_for(aot.launch_of(case), case.architecture))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in TESTED], ids=str)
def test_every_other_configuration_fits_its_architecture(case):
    verify(case, aot.compile_for(aot.launch_of(case), case.architecture))


def test_every_architecture_has_an_entry_for_every_operation_shape_and_dtype():
    keys = {
        (architecture, operation, shape, dtype)
        for architecture in ("sm_80", "sm_86", "sm_90", "sm_100")
        for operation in ("rowwise", "colwise", "gated")
        for shape in ("few", "short", "long")
        for dtype in ("half", "float32")
    }
    assert set(configs.TILES) == keys
    assert set(configs.ROWS) == {"sum_of_squares", "scale"}
    assert set(aot.SHARED) == set(configs.ARCHITECTURES)


@pytest.mark.parametrize(
    ("tile", "fault"),
    [(Tile(128, 256, 64, 4, 3), "spills"), (Tile(128, 256, 64, 8, 6), "shared")],
    ids=["too few warps", "too many stages"],
)
def test_the_report_shows_a_configuration_that_does_not_fit(tile, fault, monkeypatch):
    monkeypatch.setitem(configs.TILES, ("sm_80", "colwise", "long", "half"), tile)
    case = aot.Case("sm_80", "colwise", "long", "bfloat16", True)
    result = aot.compile_for(aot.launch_of(case), case.architecture)
    assert getattr(result, fault) > (aot.SHARED["sm_80"] if fault == "shared" else 0)


KERNELS = {
    "rowwise": rowwise.rowwise_kernel,
    "rowwise_tma": rowwise_tma.rowwise_tma_kernel,
    "colwise": colwise.colwise_kernel,
    "colwise_tma": colwise_tma.colwise_tma_kernel,
    "gated": gated.gated_kernel,
    "gated_tma": gated_tma.gated_tma_kernel,
    "sum_of_squares": rms_norm.sum_of_squares_kernel,
    "scale": rms_norm.scale_kernel,
}


@pytest.mark.parametrize("operation", KERNELS)
def test_the_number_of_rows_does_not_recompile(operation, monkeypatch):
    """Every count of rows in one shape class gives the compiler the same types, constants and hints."""
    sources = []
    for rows in (513, 1000, 1024, 4608):
        monkeypatch.setitem(aot.ROWS, "long", rows)
        launch = aot.launch_of(aot.Case("sm_90", operation, "long", "bfloat16", True))
        assert launch.kernel is KERNELS[operation]
        assert launch.arguments["M"] == rows
        source = aot.source_of(launch)
        sources.append((source.signature, source.constants, source.attrs))
    assert all(source == sources[0] for source in sources)


def test_a_hint_is_given_only_where_it_holds():
    """A width that is no multiple of 16 has none, and a stride of 1 is a constant."""
    x = torch.empty(40, 30, dtype=torch.bfloat16, device="meta")
    launch = rms_norm.sum_of_squares_launch(x, torch.empty(40, device="meta"), configs.INTERPRETED_ROW)
    source = aot.source_of(launch)
    assert source.signature["D"] == "i32" and source.signature["stride_xd"] == "constexpr"
    assert sorted(source.attrs) == [(0,), (1,)]
