"""The benchmarks' own code: which layers they measure, what a row says, what is chosen from rows, and the dry run."""

import csv
import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import choose
import record
import shapes
import timing
import variants
from tp_layers.kernels import backend

BENCH = Path(record.__file__).parent
CASES = shapes.cases()


def row(variant, microseconds, layer="ff out", operation="rowwise", tokens=4608, architecture="sm_90", error="1e-3"):
    return {
        "architecture": architecture,
        "operation": operation,
        "tokens": tokens,
        "dtype": "bfloat16",
        "model": "FLUX.1",
        "layer": layer,
        "size": 4,
        "variant": variant,
        "microseconds": microseconds,
        "error": error,
        "machine": "a GPU",
        "torch": "2",
        "triton": "3",
        "commit": "abc",
    }


def chosen(tmp_path, rows):
    """FASTER of the file that `choose.py` writes."""
    table, output = tmp_path / "kernels.csv", tmp_path / "measured.py"
    with table.open("w", newline="") as file:
        writer = csv.DictWriter(file, row("triton", 1))
        writer.writeheader()
        writer.writerows(rows)
    choose.main([str(table), "--output", str(output)])
    spec = importlib.util.spec_from_file_location("written", output)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.FASTER, output.read_text()


def test_every_operation_is_measured_in_every_class_of_shapes_and_at_every_size():
    assert {case.operation for case in CASES} == set(backend.OPERATIONS)
    for operation in backend.OPERATIONS:
        mine = [case for case in CASES if case.operation == operation]
        assert {case.tokens for case in mine} >= {2, 512, 4096, 4608}
        assert {case.size for case in mine} == {1, 2, 4, 8}
    assert any(case.tokens == 32768 for case in CASES)
    assert len(set(CASES)) == len(CASES)


def test_a_rank_has_its_part_of_the_operations():
    for layer in shapes.LAYERS:
        whole = layer.on(1, 4608)
        assert whole.flops == 8 * layer.on(8, 4608).flops
        assert all(width % 8 == 0 for width in (*layer.on(8, 2).depths, *layer.on(8, 2).widths))


def test_the_first_cases_are_one_of_each_layer():
    first = CASES[: len(shapes.LAYERS)]
    assert len({(case.model, case.layer, case.operation) for case in first}) == len(shapes.LAYERS)


def test_bytes_and_floor_of_a_layer_and_of_a_norm():
    gemm = shapes.Case("", "", "rowwise", 1, 3, (5,), (7,))
    assert gemm.flops == 2 * 3 * 5 * 7
    assert gemm.nbytes(2) == 2 * (3 * 5 + 5 * 7 + 3 * 7)
    assert shapes.Case("", "", "gated_colwise", 1, 3, (5,), (7, 7)).nbytes(2) == 2 * (3 * 5 + 5 * 14 + 3 * 7)
    assert shapes.Case("", "", "sum_of_squares", 1, 3, (5,)).nbytes(2) == 2 * 3 * 5 + 4 * 3
    assert shapes.Case("", "", "scale", 1, 3, (5,)).nbytes(2) == 2 * 2 * 3 * 5
    assert shapes.floor(gemm, 2, 10.0, 1e9) == (21.0, "matmul")
    assert shapes.floor(gemm, 2, 1e9, 71.0) == (2.0, "copy")


@pytest.mark.parametrize("operation", backend.OPERATIONS)
def test_the_variants_agree(operation):
    case = next(case for case in CASES if case.operation == operation).tiny()
    made = variants.variants_of(case, "cpu", torch.float32)
    assert set(made) - {"separate"} == {"triton", "torch"}
    wanted = made["torch"]()
    assert variants.distance(made.get("separate", made["torch"])(), wanted) < 1e-5
    wrong = tuple(2 * y for y in wanted) if isinstance(wanted, tuple) else 2 * wanted
    assert variants.distance(wrong, wanted) == pytest.approx(1, abs=1e-5)


def test_variants_take_turns_and_their_median_is_taken():
    calls = []
    pair = {name: lambda name=name: calls.append(name) for name in ("first", "second")}
    times = timing.interleaved(pair, "cpu", seconds=0)
    assert calls == ["first", "second"] * (len(calls) // 2)
    assert set(times) == set(pair) and all(math.isfinite(time.median) for time in times.values())
    calls = [(1.0, 7.0), (2.0, 8.0), (3.0, 9.0), (4.0, 10.0), (100.0, 11.0)]
    assert timing.summary(calls) == (3.0, pytest.approx(2 / 3), 9.0)


def test_a_call_on_a_gpu_is_timed_between_events_after_the_cache_was_flushed(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("event")

        def elapsed_time(self, end):
            return 5.0

    class Scratch:
        def zero_(self):
            log.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait"))
    monkeypatch.setattr(torch, "empty", lambda length, dtype, device: Scratch())
    times = timing.interleaved({"one": lambda: log.append("call")}, "cuda", seconds=0)
    turn = ["flush", "event", "call", "event"]
    # One round to see how long it takes, then three.
    assert log == [*turn, "wait", *3 * turn, "wait"]
    assert times["one"].median == 0.005 and times["one"].spread == 0 and 0 < times["one"].host < 1


def test_rows_are_on_disk_as_soon_as_they_are_written_and_name_their_commit(tmp_path, monkeypatch):
    monkeypatch.setenv("COMMIT", "abc123")
    path = tmp_path / "new" / "table.csv"
    for append in (False, True):
        with record.Table(path, append) as table:
            table.write({"a": 1})
            assert path.read_text().count("abc123") == 1 + append
    assert path.read_text().count("a,machine,torch,triton,commit") == 1
    with record.Table(path, append=True) as table, pytest.raises(ValueError, match="'b'"):
        table.write({"b": 1})
    with record.Table(path) as table:
        table.write({"b": 1})
    assert (
        path.read_text().splitlines()[0] == "b,machine,torch,triton,commit" and len(path.read_text().splitlines()) == 2
    )


def test_the_kernel_is_chosen_where_it_wins_and_loses_nowhere(tmp_path):
    rows = [
        row("triton", 80),
        row("torch", 100),
        row("triton", 101, layer="attn to_out"),
        row("torch", 100, layer="attn to_out"),
        row("compiled", 1),
        row("triton", 80, tokens=512),
        row("torch", 100, tokens=512),
        row("triton", 110, tokens=512, layer="attn to_out"),
        row("torch", 100, tokens=512, layer="attn to_out"),
        row("triton", 101, tokens=2),
        row("torch", 100, tokens=2),
    ]
    found, text = chosen(tmp_path, rows)
    assert found == {
        ("sm_90", "rowwise", "long", "half"): "triton",
        ("sm_90", "rowwise", "short", "half"): "torch",
        ("sm_90", "rowwise", "few", "half"): "torch",
    }
    assert "# 1.11, 0.99 of 2" in text and "Measured on a GPU, torch 2, triton 3, commit abc." in text


def test_a_failed_a_wrong_or_an_unmeasured_kernel_is_never_chosen(tmp_path):
    rows = [
        row("triton", "", error=""),
        row("torch", 100),
        row("triton", 1, operation="colwise", error="0.5"),
        row("torch", 100, operation="colwise"),
        row("triton", 1, operation="gated_colwise", error="nan"),
        row("torch", 100, operation="gated_colwise"),
        row("triton", 1, operation="scale"),
        row("triton", 1, architecture="cpu"),
        row("torch", 100, architecture="cpu"),
    ]
    found, _ = chosen(tmp_path, rows)
    assert found == {("sm_90", name, "long", "half"): "torch" for name in ("colwise", "gated_colwise", "rowwise")}


def test_the_written_file_is_as_the_formatter_has_it_with_and_without_entries(tmp_path):
    ruff = pytest.importorskip("ruff", reason="the formatter is not installed")
    for rows in ([row("triton", 80), row("torch", 100)], []):
        _, text = chosen(tmp_path, rows)
        command = [ruff.find_ruff_bin(), "format", "--check", "--line-length", "120", str(tmp_path / "measured.py")]
        assert subprocess.run(command, timeout=60).returncode == 0, text


@pytest.mark.slow
def test_the_dry_run_of_the_device_script(tmp_path):
    pytest.importorskip("triton", reason="the interpreter is part of triton, which is for Linux alone")
    for absent in ("diffusers", "transformers"):
        (tmp_path / f"{absent}.py").write_text("raise ImportError")
    environment = {**os.environ, "DRY_RUN": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    # It takes a minute; the limit is for a busy machine.
    environment |= {"PYTHONPATH": str(tmp_path), "SECONDS_IN_ALL": "240"}
    run = subprocess.run(
        ["bash", str(BENCH / "device.sh")], env=environment, capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    with (tmp_path / "kernels.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    ran = {row["operation"] for row in rows if row["variant"] == "triton" and row["microseconds"]}
    assert ran == set(backend.OPERATIONS)
    assert all(bool(row["microseconds"]) != bool(row["note"]) for row in rows)
    assert all(float(row["error"]) < 1e-5 for row in rows if row["error"])
    with (tmp_path / "all_reduce.csv").open(newline="") as file:
        sums = list(csv.DictReader(file))
    assert sums and all((row["way"], row["right"], row["identical"]) == ("nccl", "True", "True") for row in sums)
    assert "WINDOWS" in (tmp_path / "windows.py").read_text()
    assert "FASTER" in (tmp_path / "measured.py").read_text()
    log = (tmp_path / "log.txt").read_text()
    for name in (
        "test_rowwise_of_one_and_two_inputs",
        "test_chunks_are_the_whole_bit_for_bit",
        "test_replays_are_eager_bit_for_bit",
        "test_outputs_are_in_registered_memory",
    ):
        assert name in log
