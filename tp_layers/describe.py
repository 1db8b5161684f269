"""`describe`: what a plan does to a model at some size, without touching a weight."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .plans import streams
from .plans.flow import partial_inputs
from .plans.lint import pattern
from .plans.pairs import norm_pairs
from .plans.registry import plan_for
from .plans.resolve import Resolved, resolve
from .plans.shard import sharding_of, target_of
from .plans.spec import ShardSpec
from .plans.styles import label

LARGEST_WHOLE = 6


@dataclass(frozen=True)
class Tensor:
    """One parameter or persistent buffer: bytes in full and on the rank with the most, and its spec (None: whole)."""

    name: str
    shape: tuple[int, ...]
    local_shape: tuple[int, ...]
    itemsize: int
    spec: ShardSpec | None

    @property
    def full_bytes(self) -> int:
        """Bytes of the unsharded tensor."""
        return math.prod(self.shape) * self.itemsize

    @property
    def held_bytes(self) -> int:
        """Bytes of it on every rank, or on rank 0, which has the most where ranks differ."""
        return math.prod(self.local_shape) * self.itemsize


@dataclass(frozen=True)
class Collective:
    """Collectives of one forward call: how many of a kind, and their payload in bytes per row (token) of input."""

    kind: str
    count: int
    bytes_per_row: int


@dataclass(frozen=True)
class Call:
    """One collective: of the module at `path`, with its payload; `along`: it goes along with the one before."""

    path: str
    kind: str
    bytes_per_row: int
    along: bool


@dataclass(frozen=True)
class Report:
    """What `describe` found; `str(report)` is the table the command prints."""

    model: str
    size: int
    tensors: list[Tensor]
    styles: dict[str, str]
    collectives: list[Collective]
    sizes: list[int]
    notes: list[str]

    @property
    def full_bytes(self) -> int:
        """Bytes of the whole model: parameters and persistent buffers."""
        return sum(tensor.full_bytes for tensor in self.tensors)

    @property
    def held_bytes(self) -> int:
        """Bytes that each rank holds, of its shards and of what stays whole; where ranks differ, rank 0, the most."""
        return sum(tensor.held_bytes for tensor in self.tensors)

    @property
    def is_even(self) -> bool:
        """Whether all ranks hold as much."""
        return all(tensor.spec is None or tensor.spec.is_even(self.size) for tensor in self.tensors)

    @property
    def whole_bytes(self) -> int:
        """Bytes of the tensors that stay whole on every rank."""
        return sum(tensor.full_bytes for tensor in self.tensors if tensor.spec is None)

    def __str__(self) -> str:
        full = max(self.full_bytes, 1)
        sharded = sum(1 for tensor in self.tensors if tensor.spec is not None)
        holder = "each rank holds " if self.is_even else "largest rank    "
        lines = [
            f"{self.model} over {self.size} ranks (sizes that work: {', '.join(map(str, self.sizes))})",
            f"  full model       {_size(self.full_bytes)}, {len(self.tensors)} tensors, {sharded} of them sharded",
            f"  {holder} {_size(self.held_bytes)}, {self.held_bytes / full:.1%} of the model",
            f"  whole everywhere {_size(self.whole_bytes)}, {self.whole_bytes / full:.1%} of the model",
            *(f"    {nbytes / full:6.1%}  {name}" for name, nbytes in self.largest_whole()),
            "  collectives per forward call",
            *(
                f"    {item.count} x {item.kind}, {item.bytes_per_row} bytes per row in all"
                for item in self.collectives
            ),
            *(f"  note: {note}" for note in self.notes),
        ]
        return "\n".join(lines)

    def largest_whole(self) -> list[tuple[str, int]]:
        """The largest tensors that stay whole, summed over blocks: `("blocks.*.norm.linear.weight", bytes)`."""
        sums: dict[str, int] = {}
        for tensor in self.tensors:
            if tensor.spec is None:
                sums[pattern(tensor.name)] = sums.get(pattern(tensor.name), 0) + tensor.full_bytes
        return sorted(sums.items(), key=lambda item: -item[1])[:LARGEST_WHOLE]


def describe(
    model: nn.Module,
    plan: Mapping[str, Any] | None = None,
    *,
    size: int | None = None,
    check: bool = True,
    uneven: bool = False,
) -> Report:
    """What `apply(model, plan)` would do on `size` ranks, or, for a sharded model, what was done to it.

    Args:
        model: a meta model is enough; only shapes, dtypes and attributes are read.
        plan: as in `apply`; not for a model that is sharded already, which knows its own.
        size: the number of ranks; needed unless the model is sharded.
        check, uneven: as in `apply`.

    Raises:
        ValueError: the plan does not fit (see `resolve`), the size is missing, or it is not the sharded model's own.
    """
    sharding = sharding_of(model)
    if sharding is not None:
        own = sharding.resolved
        if plan is not None or size not in (None, own.size) or uneven not in (False, own.uneven):
            raise ValueError(
                f"this model is sharded over {sharding.group.size} ranks already: describe(model) says how"
            )
        resolved, taken = own, True
    elif size is None:
        raise ValueError("describe needs size=, the number of ranks")
    else:
        chosen = plan_for(model) if plan is None else plan
        resolved, taken = resolve(model, chosen, size, check=check, uneven=uneven), False
    return report(model, resolved, taken)


def report(model: nn.Module, resolved: Resolved, taken: bool = False) -> Report:
    """What `resolved` does to `model`, or, if it is `taken`, has done to it."""
    return Report(
        type(model).__name__,
        resolved.size,
        _tensors(model, resolved, taken),
        {path: label(style) for path, style in resolved.styles.items()},
        _collectives(model, resolved),
        resolved.sizes,
        resolved.notes,
    )


def _tensors(model: nn.Module, resolved: Resolved, taken: bool) -> list[Tensor]:
    found: dict[int, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        spec, shape = resolved.specs.get(name), tuple(tensor.shape)
        full, local = shape, shape
        if spec is not None:
            full = spec.full_shape(shape) if taken else shape
            local = spec.local_shape(full, 0, resolved.size)
        # Tied tensors count once.
        found.setdefault(id(tensor), Tensor(name, full, local, tensor.dtype.itemsize, spec))
    return list(found.values())


def _collectives(model: nn.Module, resolved: Resolved) -> list[Collective]:
    found: dict[str, tuple[int, int]] = {}
    for call in calls(model, resolved):
        count, nbytes = found.get(call.kind, (0, 0))
        found[call.kind] = count + (not call.along), nbytes + call.bytes_per_row
    return [Collective(kind, count, nbytes) for kind, (count, nbytes) in found.items()]


def calls(model: nn.Module, resolved: Resolved) -> Iterator[Call]:
    """Every collective of one forward call without gradients, in the plan's order."""
    along = {f"{path}.norm_k" for path in norm_pairs(resolved.styles, resolved.size)} | streams.along(model)
    for path, style in resolved.styles.items():
        if style.collective is not None and resolved.size > 1:
            yield Call(path, style.collective, _payload(model, resolved, path), path in along)


def _payload(model: nn.Module, resolved: Resolved, path: str) -> int:
    """Bytes per row of the collective at `path`; where partial sums are added, those of any one of them."""
    if resolved.styles[path].input == "partial":
        path = next(iter(partial_inputs(resolved.styles, path)), path)
    return resolved.styles[path].payload(target_of(model, path))


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"
