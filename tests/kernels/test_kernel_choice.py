"""Which backend runs: the keyword, the environment variable, the measured table, and what is refused."""

import subprocess
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tp_layers.kernels import backend, configs, measured
from tp_layers.kernels.colwise import colwise, colwise_blocks
from tp_layers.kernels.gated import gated_colwise
from tp_layers.kernels.rms_norm import scale, sum_of_squares
from tp_layers.kernels.rowwise import rowwise

X = torch.zeros(2, 4)
W = torch.zeros(6, 4)
LAUNCHERS = {
    "rowwise": lambda **rest: rowwise(X, W, **rest),
    "packed_rowwise": lambda **rest: rowwise((X[:, :1], X[:, 1:]), W, **rest),
    "colwise": lambda **rest: colwise(X, W, **rest),
    "colwise_blocks": lambda **rest: colwise_blocks(X, W, ranges=[(0, 2), (2, 6)], **rest),
    "gated_colwise": lambda **rest: gated_colwise(X, W, **rest),
    "sum_of_squares": lambda **rest: sum_of_squares(X, **rest),
    "scale": lambda **rest: scale(X, torch.ones(2, 1), 4, 1e-5, **rest),
}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    monkeypatch.delenv("TP_LAYERS_BACKEND", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def cuda(*shape, dtype=torch.bfloat16):
    with FakeTensorMode():
        return torch.empty(shape, dtype=dtype, device="cuda")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(backend, "architecture", lambda device: "sm_90")
    monkeypatch.setattr(backend, "has_triton", lambda: True)
    monkeypatch.setattr(measured, "FASTER", {})


@pytest.mark.parametrize("operation", backend.OPERATIONS)
def test_auto_on_a_cpu_is_the_twin(operation):
    assert backend.choose(operation, X) == "torch"
    assert backend.choose(operation, X, "auto") == "torch"


@pytest.mark.parametrize("operation", backend.OPERATIONS)
def test_auto_on_cuda_is_triton_where_a_pass_is_saved(operation, hopper):
    bare = operation in ("rowwise", "colwise")
    assert backend.choose(operation, cuda(4608, 3072)) == ("torch" if bare else "triton")


def test_a_measurement_decides_for_its_own_shapes_and_dtype(hopper, monkeypatch):
    monkeypatch.setitem(measured.FASTER, ("sm_90", "rowwise", "long", "half"), "triton")
    monkeypatch.setitem(measured.FASTER, ("sm_90", "gated_colwise", "short", "half"), "torch")
    assert backend.choose("rowwise", cuda(4608, 3072)) == "triton"
    assert backend.choose("rowwise", cuda(512, 3072)) == "torch"
    assert backend.choose("rowwise", cuda(4608, 3072, dtype=torch.float32)) == "torch"
    assert backend.choose("gated_colwise", cuda(512, 3072)) == "torch"
    assert backend.choose("gated_colwise", cuda(4608, 3072)) == "triton"
    assert {tuple(row[:3]): row.reason for row in backend.choices("sm_90")}["rowwise", "long", "half"] == "measured"


def test_auto_on_cuda_without_triton_or_for_float64_or_under_autocast_is_the_twin(hopper, monkeypatch):
    assert backend.choose("scale", cuda(8, 8, dtype=torch.float64)) == "torch"
    with monkeypatch.context() as patch:
        # torch.autocast("cuda") turns itself off in a build of torch without CUDA.
        patch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
        assert backend.choose("scale", cuda(8, 8)) == "torch"
        with pytest.raises(ValueError, match="autocast"):
            backend.choose("scale", cuda(8, 8), "triton")
    assert backend.choose("scale", cuda(8, 8)) == "triton"
    monkeypatch.setattr(backend, "has_triton", lambda: False)
    assert backend.choose("scale", cuda(8, 8)) == "torch"


def test_the_table_of_choices_names_every_operation_and_why():
    rows = backend.choices("sm_90")
    assert {row.operation for row in rows} == set(backend.OPERATIONS)
    assert len(rows) == len(backend.OPERATIONS) * len(configs.SHAPE_CLASSES) * len(configs.DTYPE_CLASSES)
    assert all(row.backend in ("triton", "torch") and row.reason for row in rows)


@pytest.mark.parametrize("launch", LAUNCHERS.values(), ids=LAUNCHERS)
def test_every_launcher_heeds_the_keyword_and_the_environment(launch, monkeypatch):
    launch(backend="torch")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        launch(backend="triton")
    with pytest.raises(ValueError, match="backend is 'cublas', it must be one of auto, triton, torch"):
        launch(backend="cublas")
    monkeypatch.setenv("TP_LAYERS_BACKEND", "triton")
    with pytest.raises(ValueError, match="TRITON_INTERPRET=1"):
        launch()
    launch(backend="torch")
    monkeypatch.setenv("TP_LAYERS_BACKEND", "fast")
    with pytest.raises(ValueError, match="TP_LAYERS_BACKEND is 'fast'"):
        launch()


def test_float64_is_refused_by_the_kernels_and_not_by_auto():
    with pytest.raises(ValueError, match=r"not torch\.float64"):
        colwise(X.double(), W.double(), backend="triton")
    assert colwise(X.double(), W.double()).dtype == torch.float64


def test_the_nearest_older_architecture_stands_in_for_an_unlisted_one():
    known = {(8, 0): "sm_80", (8, 6): "sm_86", (8, 9): "sm_86", (9, 0): "sm_90", (10, 0): "sm_100", (12, 0): "sm_86"}
    assert {pair: configs.architecture_of(*pair) for pair in known} == known
    assert configs.architecture_of(10, 1) == "sm_100"
    assert configs.architecture_of(12, 1) == "sm_86"


def test_the_package_and_its_twins_work_without_triton_and_do_not_import_it():
    code = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "triton":
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refuse())
import torch, tp_layers
from tp_layers.kernels.gated import gated_colwise
from tp_layers.kernels.rowwise import rowwise
rowwise((torch.ones(2, 3), torch.ones(2, 1)), torch.ones(4, 4))
gated_colwise(torch.ones(2, 3), torch.ones(4, 3))
assert not any(name.split(".")[0] == "triton" for name in sys.modules), "triton was imported"
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
