"""`verify`: does a plan compute what the unsharded model computes? Layer by layer, so that a fault has a place.

The model runs once on one rank and once sharded, in float32. Every module's output is compared with the unsharded
module's, or, where the plan makes it split, with this rank's part of it; so is the input of each module that takes a
split one. The first that differs is the verdict.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .exchange import gather_objects
from .group import Group, GroupLike
from .launch import Ranks
from .plans.context import refuse_context
from .plans.refuse import refuse, refuse_planned
from .plans.registry import plan_for
from .plans.resolve import Resolved, resolve
from .plans.shard import shard_model
from .trace import TOLERANCE, Finding, Recorder, findings


@dataclass(frozen=True)
class Verification:
    """The verdict of `verify`; `str(verification)` is what the command prints.

    `error` is the largest relative error of the model's output on any rank, `layers` the findings of the planned
    modules on rank 0, `first_wrong` the first finding that is off, and `after` the planned module that ran before it.
    """

    model: str
    size: int
    ok: bool
    error: float
    identical: bool
    layers: list[Finding]
    first_wrong: Finding | None = None
    after: str = ""

    def __str__(self) -> str:
        lines = [f"{self.model} on {self.size} ranks: {'equal to one rank' if self.ok else 'WRONG'}"]
        lines += [f"  relative error of the output {self.error:.2e}"] if not math.isnan(self.error) else []
        lines += [] if self.identical else ["  the ranks' outputs are not bit-identical"]
        if self.first_wrong is not None:
            wrong = self.first_wrong
            name = wrong.path or "the model itself"
            reason = wrong.problem or f"relative error {wrong.error:.2e}"
            lines.append(f"  first wrong: the {wrong.place} of '{name}': {reason}")
            lines += [f"  the planned module that ran before it: '{self.after}'"] if self.after else []
        worst = max((item.error for item in self.layers if not math.isnan(item.error)), default=math.nan)
        lines.append(f"  {len(self.layers)} tensors of planned modules compared, largest relative error {worst:.2e}")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    inputs: Mapping[str, Any] | Sequence[Any] | torch.Tensor,
    plan: Mapping[str, Any] | None = None,
    *,
    size: int | None = None,
    group: GroupLike = None,
    check: bool = True,
    uneven: bool = False,
) -> Verification:
    """Compares `model` sharded by `plan` with itself on one rank, layer by layer. The model is not changed.

    Under torchrun, or with a `group`, these ranks do it, each with the same model and inputs; otherwise `size` CPU
    processes are started (the calling script then needs `if __name__ == "__main__":`, and a model that can be pickled).

    Args:
        model: whole; it is copied and compared in float32, with dropout off.
        inputs: keyword arguments (a mapping), positional ones (a sequence), or the one tensor of its forward.
        plan, check, uneven: as in `apply`.
        size: the number of ranks to start; under a group it may be left out.

    Raises:
        ValueError: the plan does not fit or the model cannot be sharded, as in `apply`.
    """
    given = group is not None or (dist.is_available() and dist.is_initialized())
    size = Group.of(group).size if given else size
    if size is None:
        raise ValueError("verify needs size=, the number of ranks to start")
    plan = plan_for(model) if plan is None else plan
    refuse(model)
    if given:
        refuse_context(model, Group.of(group))
    resolved = resolve(model, plan, size, check=check, uneven=uneven)
    refuse_planned(model, resolved)
    if given:
        return compare(Group.of(group), model, inputs, resolved)
    with Ranks(size) as ranks:
        return ranks.run(compare, model, inputs, resolved)[0]


def compare(group: Group, model: nn.Module, inputs: Any, resolved: Resolved) -> Verification:
    """`verify` on the ranks of `group`."""
    # nn.Module's own `to`: diffusers' warns about modules it would rather keep in float32, which these all become.
    model = nn.Module.to(copy.deepcopy(model), group.device, torch.float32).eval()
    inputs = _prepare(inputs, group.device)
    plan = resolved.styles
    reference = Recorder(model, resolved)
    reference.run(inputs)
    if reference.failure is not None:
        raise ValueError(f"the unsharded model fails on these inputs: {reference.failure}")
    if not reference.events[-1].tensors:
        raise ValueError(f"{type(model).__name__} returns no tensors that could be compared")
    shard_model(model, resolved, group)
    sharded = Recorder(model, resolved)
    sharded.run(inputs)
    found = list(findings(reference, sharded, resolved, group))
    wrong = next((number for number, item in enumerate(found) if not item.error <= TOLERANCE), None)
    final = [item for item in found if item.path == "" and item.place == "output"]
    error = max((item.error for item in final), default=math.nan)
    outputs = [tensor.cpu() for event in sharded.events[-1:] if event.path == "" for tensor in event.tensors]
    everyone = gather_objects((wrong, found, error, outputs), group)
    # The rank whose fault shows first speaks; ties go to the lowest rank.
    number, first = min((w if w is not None else len(f), rank) for rank, (w, f, _, _) in enumerate(everyone))
    said = everyone[first][1]
    first_wrong = said[number] if number < len(said) else None
    before = [
        item.path for item in said[:number] if first_wrong and item.path in plan and item.path != first_wrong.path
    ]
    identical = all(_same(outputs, theirs) for *_, theirs in everyone)
    return Verification(
        model=type(model).__name__,
        size=group.size,
        ok=first_wrong is None and identical,
        error=math.nan if any(math.isnan(e) for _, _, e, _ in everyone) else max(e for _, _, e, _ in everyone),
        identical=identical,
        layers=[item for item in said if item.path in plan],
        first_wrong=first_wrong,
        after=before[-1] if before else "",
    )


def _same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(ours) == len(theirs) and all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _prepare(value: Any, device: torch.device) -> Any:
    """Inputs on the device, half precision widened; a lone tensor becomes the one positional argument."""

    def move(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.to(device, torch.float32 if item.is_floating_point() else None)
        if isinstance(item, Mapping):
            return {name: move(part) for name, part in item.items()}
        return type(item)(map(move, item)) if type(item) in (list, tuple) else item

    return move((value,) if isinstance(value, torch.Tensor) else value)
