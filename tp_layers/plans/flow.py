"""Split tensors and partial sums in a plan: each must come from somewhere and be taken up by someone.

Split tensors flow within a block. Partial sums flow within the module that adds them, in which every gradient is of one
rank's term, so that the plan must say of everything in it what becomes of it.
"""

from collections.abc import Iterator, Mapping
from typing import cast

from torch import nn

from .match import Match
from .styles import Replicate, Style

# Input and output of what may stand where partial sums are added: no collective forward or backward but a norm's.
INSIDE = {("whole", "split"), ("split", "split"), ("split", "partial"), (None, "partial"), (None, None)}


def open_ends(matches: list[Match]) -> list[str]:
    """Split outputs or partial sums that no planned module takes, and such inputs that none gives; in words."""
    givers = [item.path for item in matches if item.style.output == "split" and item.style.input != "split"]
    takers = [item.path for item in matches if item.takes]
    notes = []
    for item in matches:
        said = f"plan key '{item.key}'"
        where = f"no module in '{item.block}'" if item.block else "no module in the model"
        if item.path in givers and not _within(item.block, takers):
            notes.append(f"{said}: the output of '{item.path}' is split, and {where} takes a split input")
        if item.style.input == "split" and not _within(item.block, givers):
            notes.append(f"{said}: the input of '{item.path}' must be split, and {where} gives a split output")
    return [*notes, *_partial_sums(matches)]


def partial_inputs(styles: Mapping[str, Style], path: str) -> list[str]:
    """The paths within `path` whose outputs are the partial sums that the module there adds."""
    return [other for other, style in styles.items() if style.output == "partial" and other.startswith(f"{path}.")]


def _partial_sums(matches: list[Match]) -> Iterator[str]:
    styles = {item.path: item.style for item in matches}
    adders = [item for item in matches if item.style.input == "partial"]
    for item in matches:
        said = f"plan key '{item.key}'"
        around = [adder.path for adder in adders if item.path.startswith(f"{adder.path}.")]
        if item.style.output == "partial" and not around:
            yield f"{said}: '{item.path}' leaves a partial sum, and no module around it is \"all_reduce_output\""
        if around and (item.style.input, item.style.output) not in INSIDE:
            yield (
                f"{said}: '{item.path}' is within '{around[0]}', where partial sums are added: of the layers only "
                f"colwise ones, 'rms_norm' and 'rowwise_partial' fit there"
            )
    for adder in adders:
        said = f"plan key '{adder.key}'"
        if not partial_inputs(styles, adder.path):
            yield f"{said}: nothing in '{adder.path}' leaves a partial sum for it to add"
        unnamed = _unnamed(adder, [item for item in matches if item.path.startswith(f"{adder.path}.")])
        if unnamed:
            yield (
                f"{said}: '{unnamed}' is whole within '{adder.path}', whose output would count it on every rank: shard "
                f'it, or call it "replicated_with_grad_allreduce" if it only weighs the partial sums, as a router does'
            )


def _unnamed(adder: Match, inside: list[Match]) -> str | None:
    """A parameter within the module that the plan leaves whole without saying how its gradient is summed."""
    named = [item.path for item in inside if not isinstance(item.style, Replicate)]
    for name, _ in cast(nn.Module, adder.target).named_parameters():
        path = f"{adder.path}.{name}"
        if not any(path == other or path.startswith(f"{other}.") for other in named):
            return path
    return None


def _within(block: str, paths: list[str]) -> bool:
    return any(not block or path == block or path.startswith(f"{block}.") for path in paths)
