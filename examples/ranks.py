"""Runs one of these scripts on several processes; what the demonstrations share."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def run(script: Path, results: Path, ranks: int, *arguments: str) -> list[dict[str, Any]]:
    """Runs `script ARGUMENTS RESULTS` on `ranks` processes, and returns the `RESULTS/rank-N.pt` that each wrote."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, str(script), *arguments, str(results)]
    subprocess.run(command, check=True, timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return [torch.load(results / f"rank-{rank}.pt") for rank in range(ranks)]
