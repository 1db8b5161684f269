"""Runs the tests of `interpreted/` in a process of their own: whether kernels are interpreted is fixed at import."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def test_every_interpreted_test_runs_and_passes(tmp_path):
    pytest.importorskip("triton", reason="the interpreter is part of triton, which is for Linux alone")
    report = tmp_path / "report.xml"
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("TP_LAYERS_BACKEND", None)
    command = [sys.executable, "-m", "pytest", str(HERE / "interpreted"), f"--junitxml={report}"]
    run = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    counts = ElementTree.parse(report).getroot().find("testsuite").attrib
    assert (counts["failures"], counts["errors"], counts["skipped"]) == ("0", "0", "0")
    # 311 comparisons, 91 on broken kernels, 28 of registered operations, 8 fused blocks; a file that is no longer
    # collected would pass silently.
    assert int(counts["tests"]) >= 433
