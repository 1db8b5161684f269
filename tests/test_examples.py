"""The examples run as they are."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.slow
def test_the_demo_finds_two_ranks_right():
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py")],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "TRANSFORMERS_VERBOSITY": "error"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "right" and "the ranks' pictures are bit-identical" in lines
    held = [line.split() for line in lines if line.startswith("rank ")]
    assert len(held) == 2 and all(row[6] == "51.7%" for row in held)
