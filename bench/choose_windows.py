"""Writes `tp_layers/windows.py`, which all-reduce a group takes, from the tables of `all_reduce.py`.

Of each size that was measured the fastest way is taken, if it takes at most `--most` of NCCL's time; neighbouring sizes
of one way make a window, from the first to the last of them. What lies between two windows is NCCL's. A way that was
wrong once, or whose ranks differed in a bit, is taken nowhere for that GPU, number of ranks and dtype.

    python bench/choose_windows.py bench/results/all_reduce.csv [MORE.csv ...] [--output FILE] [--most 0.95]

Give it the tables of all machines at once: the file is written anew.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from record import RESULTS, read
from tp_layers import ways, windows

Key = tuple[str, int, str]
OWN = "nccl"
CPU = "CPU "


class Window(NamedTuple):
    """Bytes of the first and the last size, the way, and NCCL's time over its own: the least in the window."""

    first: int
    last: int
    way: str
    least: float


def measured(rows: Iterable[dict[str, str]]) -> dict[Key, dict[int, dict[str, float]]]:
    """Seconds by GPU, ranks and dtype, by bytes, and by way; without those that cannot be trusted."""
    found: dict[Key, dict[int, dict[str, float]]] = {}
    wrong: set[tuple[Key, str]] = set()
    for row in rows:
        # NCCL launches nothing for the sum of one rank.
        if row["machine"].startswith(CPU) or not row["microseconds"] or row["size"] == "1":
            continue
        key = (row["machine"], int(row["size"]), row["dtype"])
        if (row["right"], row["identical"]) != ("True", "True"):
            wrong.add((key, row["way"]))
        found.setdefault(key, {}).setdefault(int(row["bytes"]), {})[row["way"]] = float(row["microseconds"])
    for key, way in wrong:
        for times in found[key].values():
            times.pop(way, None)
    return found


def chosen(sizes: dict[int, dict[str, float]], most: float) -> list[Window]:
    """The windows of one GPU, number of ranks and dtype."""
    made: list[Window] = []
    before = OWN
    for nbytes, times in sorted(sizes.items()):
        best = min((way for way in times if way in ways.WAYS), key=lambda way: times[way], default=OWN)
        if OWN not in times or best == OWN or times[best] > most * times[OWN]:
            best = OWN
        else:
            gain = times[OWN] / times[best]
            if best == before:
                first, _, _, least = made.pop()
                made.append(Window(first, nbytes, best, min(least, gain)))
            else:
                made.append(Window(nbytes, nbytes, best, gain))
        before = best
    return made


def written(found: dict[Key, list[Window]], source: str) -> str:
    """The text of `windows.py`: the one that is there, with another table and another word on where it is from."""
    text = Path(windows.__file__).read_text()
    head, _ = text.split("the least in the window.\n")
    lines = []
    for (machine, size, dtype), windows_of in sorted(found.items()):
        lines.append(f'    ("{machine}", {size}, "{dtype}"): (\n')
        lines += [f'        ({first}, {last}, "{way}"),  # {least:.2f}\n' for first, last, way, least in windows_of]
        lines.append("    ),\n")
    table = "{\n" + "".join(lines) + "}" if lines else "{}"
    return (
        f'{head}the least in the window.\n{source}"""\n\nWindow = tuple[int, int, str]\n\n'
        f"WINDOWS: dict[tuple[str, int, str], tuple[Window, ...]] = {table}\n"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", type=Path, default=[RESULTS / "all_reduce.csv"])
    parser.add_argument("--output", type=Path, default=Path(windows.__file__))
    parser.add_argument("--most", type=float, default=0.95, help="of NCCL's time (default: 0.95)")
    options = parser.parse_args(arguments)
    rows = read(options.tables)
    found = {key: chosen(sizes, options.most) for key, sizes in measured(rows).items()}
    found = {key: windows_of for key, windows_of in found.items() if windows_of}
    used = [row for row in rows if not row["machine"].startswith(CPU)]
    sources = dict.fromkeys(f"{row['machine']}, torch {row['torch']}, commit {row['commit']}" for row in used)
    source = "".join(f"\nMeasured on {source}.\n" for source in sources) or "Empty until measured.\n"
    options.output.write_text(written(found, source))
    for key, windows_of in sorted(found.items()):
        for window in windows_of:
            print(*key, window.way, f"{window.first} to {window.last} bytes, {window.least:.2f} times as fast or more")


if __name__ == "__main__":
    main()
