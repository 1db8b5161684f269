"""Damaged checkpoints: `load` gives, bit for bit, what safetensors reads from them, or an error that names the file."""

import os
import shutil
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import tp_layers
from fuzz_case import INDEX, Slow, differing, limited, plan, read_or_none
from index_files import FIRST, SECOND, STEM, write_index
from mutate import BYTES, Kind, weights
from mutate_header import HEADERS
from mutate_json import CONTENTS
from toy import Toy, save_toy
from tp_layers.group import Group

KINDS: dict[str, Kind] = {**BYTES, **HEADERS, **CONTENTS}
SECONDS = 5
# Each process's view: a group without a process group asks nobody.
VIEWS = (Group(0, 1), Group(0, 2), Group(1, 2))


class Case(NamedTuple):
    """One mutation. It is the same whenever it is made: its words are the seed."""

    kind: str
    number: int

    def __str__(self) -> str:
        return f"{self.kind}, {self.number}"

    @property
    def base(self) -> str:
        """The checkpoint that it spoils; the two take turns."""
        several = KINDS[self.kind].target in ("index", "files") or self.number % 2
        return "several files" if several else "one file"


CASES = [Case(name, number) for name, kind in KINDS.items() for number in range(kind.count)]


def names_its_file(message: str, folder: Path, kind: Kind, target: Path) -> bool:
    """The message names the file that was spoilt (or its index), or a file where several do not fit, or the folder."""
    files = {INDEX, "config.json", FIRST, SECOND, f"{STEM}.safetensors"}
    named = {name for name in files if name in message}
    blamed = {target.name, INDEX} if kind.target == "weights" else files
    return bool(named & blamed) or (not named and str(folder) in message)


def surroundings() -> tuple[object, ...]:
    """What a load changes for a while, and must leave as it was."""
    return torch.get_default_dtype(), nn.Module.register_parameter, len(os.listdir("/proc/self/fd"))


def attempt(case: Case, group: Group, folder: Path, target: Path, later: Callable[[], object]) -> bool:
    """Whether it loads. Raises AssertionError where a load is neither right nor properly refused."""
    kind, dtype = KINDS[case.kind], (None, torch.bfloat16)[(case.number // 2 + group.size) % 2]
    where = f"{case}: rank {group.rank} of {group.size}, {dtype}: "
    before = read_or_none(folder) if kind.late else None
    around = surroundings()
    try:
        with limited(SECONDS, folder):
            model = tp_layers.load(Toy, folder, plan=plan(later), group=group, dtype=dtype, device="cpu")
    except (ValueError, OSError) as error:
        assert names_its_file(str(error), folder, kind, target), where + f"names no file: {error!r}"[:600]
        model = None
    except (Exception, Slow) as error:
        raise AssertionError(where + f"{type(error).__name__}: {error}"[:600]) from error
    assert surroundings() == around, where + f"leaves {surroundings()} of {around}"
    if model is None:
        return False
    # What happens during a load may come too late for it.
    states = [state for state in (before, read_or_none(folder)) if state is not None]
    assert states, where + "loads what safetensors refuses"
    wrong = min((differing(model, state, group, dtype) for state in states), key=len)
    assert not wrong, where + f"loads, but {wrong} are not what safetensors reads"
    return True


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> Path:
    """A checkpoint in one file, and the same in several with their index."""
    folder = tmp_path_factory.mktemp("bases")
    for base in ("one file", "several files"):
        (folder / base).mkdir()
        state = save_toy(folder / base)
    (folder / base / f"{STEM}.safetensors").unlink()
    places = {name: FIRST if name.startswith(("up", "embed", "scale", "shift")) else SECOND for name in state}
    for file in (FIRST, SECOND):
        held = {name: tensor for name, tensor in state.items() if places[name] == file}
        save_file(held, folder / base / file, metadata={"format": "pt"})
    write_index(folder / base, places)
    return folder


class Outcome(NamedTuple):
    """Whether a mutation was loaded, in each view; whether safetensors reads what it left; what went wrong."""

    loads: list[bool]
    theirs: bool
    wrong: list[str]


@pytest.fixture(scope="module")
def outcome(bases, tmp_path_factory) -> Callable[[Case], Outcome]:
    """The outcome of a case, found once."""
    made = tmp_path_factory.mktemp("made")

    def spoilt(case: Case, view: int) -> tuple[Path, Path, Callable[[], object]]:
        """A checkpoint, the file of it that is spoilt, and what spoils that later, if it is not yet."""
        kind, folder = KINDS[case.kind], made / f"{case}, {view}"
        shutil.copytree(bases / case.base, folder)
        random = Random(str(case))
        single = {"index": folder / INDEX, "config": folder / "config.json"}
        target = random.choice(weights(folder)) if kind.target == "weights" else single.get(kind.target, folder)
        spoil = cache(partial(kind.spoil, random, case.number, target))
        if not kind.late:
            spoil()
        return folder, target, spoil

    def find(case: Case) -> Outcome:
        loads, wrong, views = [], [], {}
        for number, group in enumerate(VIEWS):
            view = number if KINDS[case.kind].late else 0
            views[view] = views.get(view) or spoilt(case, view)
            try:
                loads.append(attempt(case, group, *views[view]))
            except AssertionError as error:
                wrong.append(str(error))
        return Outcome(loads, read_or_none(views[0][0]) is not None, wrong)

    return cache(find)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_loads_as_safetensors_reads_it_or_is_refused_by_name(outcome, case):
    loads, _, wrong = outcome(case)
    kind = KINDS[case.kind]
    assert not wrong, "\n".join(wrong)
    if kind.outcome != "either":
        assert set(loads) == {kind.outcome == "loads"}, f"{case}: {loads}"
    if not kind.late:
        assert len(set(loads)) == 1, f"{case}: the ranks do not agree: {loads}"


def test_the_fuzzer_is_alive(outcome):
    found = {case: outcome(case) for case in CASES}
    assert len(found) >= 250 and {case.kind for case in found} == set(KINDS)
    counts = Counter((all(result.loads), result.theirs) for result in found.values() if not result.wrong)
    share = {key: count / len(found) for key, count in counts.items()}
    # Both refuse; both read; safetensors reads files that are no checkpoint of this model.
    assert share[False, False] > 0.4 and share[True, True] > 0.1 and share[False, True] > 0.1, share
    late = [found[case].loads for case in found if KINDS[case.kind].late]
    # What is written to a file after its header was read is always seen.
    assert late and not any(any(loads) for loads in late), late
