"""The layers' cost on the host, by its benchmark, which exits with 1 if DTensor's is not five times theirs or more."""

import csv
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_layers_cost_a_fifth_of_dtensors_on_the_host(tmp_path):
    output = tmp_path / "host.csv"
    run = subprocess.run(
        [sys.executable, ROOT / "bench" / "host.py", "--rounds", "50", "--output", output],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    rows = list(csv.DictReader(output.open()))
    assert [row["variant"] for row in rows] == ["plain", "tp_layers", "dtensor"]
    assert all(row["machine"] and row["torch"] and row["commit"] for row in rows)
