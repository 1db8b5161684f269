"""CSV files that name where they come from, and that a run which is cut off leaves with all it finished."""

import csv
import importlib.util
import os
import platform
import subprocess
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def stamp() -> dict[str, str]:
    """The machine, the versions and the commit, as columns."""
    return {
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU {platform.machine()}",
        "torch": torch.__version__,
        "triton": version("triton") if importlib.util.find_spec("triton") else "",
        "commit": commit(),
    }


def commit() -> str:
    """The commit this tree is at, with a "+" if other files than results differ from it.

    A copy of the tree without its history takes it from the environment variable COMMIT.
    """
    if given := os.environ.get("COMMIT"):
        return given
    git = ["git", "-C", str(HERE.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", ".", ":!bench/results"], check=False)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.returncode else "")


class Table:
    """A CSV file that is written row by row, each on disk before the next is computed.

    The first row's keys are the columns; with `append` the rows follow those that are there, under their columns.
    """

    def __init__(self, path: Path, append: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file, self.stamp = path.open("a+" if append else "w+", newline=""), stamp()
        self.file.seek(0)
        self.columns = next(csv.reader(self.file), None)

    def __enter__(self) -> "Table":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.file.close()

    def write(self, row: dict[str, Any]) -> None:
        """Adds one row, stamped.

        Raises:
            ValueError: it has a column that the table lacks.
        """
        row = row | self.stamp
        writer = csv.DictWriter(self.file, self.columns or list(row), lineterminator="\n")
        if self.columns is None:
            self.columns = list(row)
            writer.writeheader()
        writer.writerow(row)
        self.file.flush()


def read(paths: Iterable[Path]) -> list[dict[str, str]]:
    """The rows of several such files, in turn."""
    rows = []
    for path in paths:
        with path.open(newline="") as file:
            rows += list(csv.DictReader(file))
    return rows
