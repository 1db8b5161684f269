"""A plan, checked against a model: every way it can be wrong is raised here, before a byte moves.

Only shapes and attributes are read, so a model on the meta device is enough.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .around_styles import HeadParameters
from .flow import open_ends
from .heads import Count, head_counts, head_norms
from .lint import left_whole
from .match import Match, match
from .misread import misread
from .spec import ShardSpec
from .styles import STYLES, Replicate, ShardParameter, Style
from .uneven import Cuts

LARGEST_SIZE = 64


@dataclass(frozen=True)
class Resolved:
    """What a plan does to one model at one size.

    `styles`: module (or bare parameter) path -> style; `specs`: parameter name -> spec, sharded parameters only;
    `sizes`: the sizes up to 64 that the plan allows; `notes`: what the reader should know; `uneven`: whether ranks may
    hold unequal parts.
    """

    size: int
    styles: dict[str, Style]
    specs: dict[str, ShardSpec]
    sizes: list[int]
    notes: list[str] = field(default_factory=list)
    uneven: bool = False


def resolve(
    model: nn.Module, plan: Mapping[str, Any], size: int, *, check: bool = True, uneven: bool = False
) -> Resolved:
    """Checks `plan` against `model` for `size` ranks.

    With `check=False`, a split output that nobody takes, a split input that nobody gives, or a split tensor that would
    be read as if it were whole (see `misread.py`), is noted instead of refused. With `uneven=True`, the size need not
    divide head counts and widths: the first ranks then hold a head more than the last (see `uneven.py`).

    Raises:
        ValueError: whatever is wrong, with the key or parameter, the numbers, and what would work.
    """
    if size < 1:
        raise ValueError(f"the size must be at least 1, got {size}")
    matches = match(model, plan)
    counts: list[Count] = []
    for item in matches:
        try:
            for name, spec in _specs(item).items():
                counts += _block_counts(name, spec)
            if isinstance(item.target, nn.Module):
                counts += [Count(f"'{item.path}': {k}", v) for k, v in item.style.counts(item.target).items()]
        except ValueError as error:
            raise ValueError(f"plan key '{item.key}' at '{item.path}': {error}") from None
    _check_parameters(matches)
    counts += head_counts(model, matches)
    cuts = Cuts(model, matches)
    sizes = _check_size(counts, cuts, size, uneven)
    notes = [*open_ends(matches), *misread(model, matches)]
    if notes and check:
        raise ValueError(f"{notes[0]}; pass check=False if that is meant")
    even = all(count.value % size == 0 for count in counts)
    matches = matches if even else cuts.matches(size, uneven)
    specs = {name: spec for item in matches for name, spec in _specs(item).items()}
    # Without functions, so that a sharded model can be pickled, and the plan sent to other processes.
    meant = [item.path for item in matches if isinstance(item.style, Replicate)]
    styles = {item.path: item.style.pinned(item.target) for item in matches if item.path not in meant}
    styles |= {} if even else cuts.regrouped(styles, size, uneven)
    for path in head_norms(model, matches):
        styles[path] = STYLES["replicated_with_grad_allreduce"]
    if size > 1:
        notes += left_whole(model, specs, meant)
    return Resolved(size, styles, specs, sizes, notes, uneven)


def _specs(item: Match) -> dict[str, ShardSpec]:
    if isinstance(item.style, Replicate):
        return {}
    if isinstance(item.style, ShardParameter):
        if isinstance(item.target, nn.Module):
            raise ValueError(f"ShardParameter names a parameter, this is the module {type(item.target).__name__}")
        return {item.path: item.style.parameter_spec(item.target)}
    if isinstance(item.target, nn.Module):
        return {f"{item.path}.{name}": spec for name, spec in item.style.specs(item.target).items()}
    if isinstance(item.style, HeadParameters):
        return {}
    raise ValueError("it is a bare parameter: only ShardParameter(dim) shards one")


def _check_parameters(matches: list[Match]) -> None:
    """Raises if a parameter of the plan belongs to a module with a plan for all of it: sharded, or summed gradients."""
    layers = {
        item.path: item for item in matches if isinstance(item.target, nn.Module) and item.style.specs(item.target)
    }
    for item in matches:
        layer = layers.get(item.path.rpartition(".")[0])
        if isinstance(item.target, nn.Parameter) and layer is not None:
            raise ValueError(f"the plan keys '{layer.key}' and '{item.key}' both plan '{item.path}': drop one of them")
    for item in matches:
        if isinstance(item.style, HeadParameters):
            for it in (it for it in matches if it.path.startswith(f"{item.path}.") and _specs(it)):
                raise ValueError(
                    f"plan key '{item.key}' sums the gradients of all of '{item.path}' over the ranks, and '{it.key}' "
                    f"shards '{it.path}' within it: name what is whole there"
                )


def _block_counts(name: str, spec: ShardSpec) -> list[Count]:
    several = f" in blocks {list(spec.blocks)}" if len(spec.blocks) > 1 else ""
    return [Count(f"'{name}' (dim {spec.dim}{several}): a block", block) for block in spec.blocks]


def _check_size(counts: list[Count], cuts: Cuts, size: int, uneven: bool) -> list[int]:
    """The sizes that work, of which `size` must be one."""
    common = math.gcd(*(count.value for count in counts)) if counts else 0

    def works(candidate: int) -> bool:
        return common % candidate == 0 or not cuts.problem(candidate, uneven)

    sizes = [candidate for candidate in range(1, LARGEST_SIZE + 1) if works(candidate)]
    if works(size):
        return sizes
    which = f"sizes that work for this plan: {', '.join(map(str, sizes))}"
    if uneven:
        raise ValueError(f"{cuts.problem(size, uneven)}; {which}")
    wrong = [count for count in counts if count.value % size]
    alone = [count for count in wrong if count.value not in cuts.shared(size)]
    first = (alone or wrong)[0]
    reason = "" if alone else f", and ranks cannot share kv heads ({cuts.problem(size, uneven)})"
    hint = "" if cuts.problem(size, True) else f"; uneven=True lets {size} ranks hold unequal parts"
    raise ValueError(f"{first.what} of {first.value} is not divisible by {size} ranks{reason}; {which}{hint}")
