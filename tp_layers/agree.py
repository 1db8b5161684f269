"""What all ranks must do alike or not at all: a rank that fails alone would leave the others in the next collective."""

import hashlib
import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from .exchange import broadcast_text, gather_objects, largest
from .group import Group
from .plans.resolve import Resolved
from .plans.styles import label

SAMPLES = 64
Result = TypeVar("Result")


class OtherRankError(ValueError):
    """Another rank has failed: this one only heard of it."""


class Alarm:
    """Lets ranks that each work by themselves for long notice soon that another one has failed.

    All ranks make it together. It goes through the group's store, which takes no turn in the order of the collectives.
    """

    # A look at the store is a round trip to rank 0's machine.
    SECONDS = 0.5

    def __init__(self, group: Group) -> None:
        self._key = "tp_layers/" + broadcast_text(uuid.uuid4().hex, group)
        self._store = group.process_group.get_group_store() if group.process_group is not None else None
        self._next = time.monotonic() + self.SECONDS

    def ring(self, message: str) -> None:
        """Tells the others."""
        if self._store is not None:
            self._store.set(self._key, message)

    def check(self) -> None:
        """Raises `OtherRankError` if another rank has rung; looks every `SECONDS`."""
        if self._store is None or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + self.SECONDS
        if self._store.check([self._key]):
            raise OtherRankError(self._store.get(self._key).decode())


def agreed(
    group: Group,
    function: Callable[[], Result],
    facts: Callable[[Result], Any] = lambda result: None,
    alarm: Alarm | None = None,
) -> Result:
    """`function()` on every rank, once all of them have done it and found the same `facts` of its result.

    With an `alarm`, which `function` checks as it goes, no rank works on for long after another has failed.

    Raises:
        Exception: what `function` raised on this rank.
        ValueError: another rank raised (its message is told), or found other facts.
    """
    error: Exception | None = None
    found: tuple[str | None, Any]
    try:
        result = function()
        found = (None, facts(result))
    except OtherRankError as heard:
        # It is told by the rank it happened on.
        error, found = heard, (None, None)
    except Exception as raised:
        error, found = raised, (f"{type(raised).__name__}: {raised}", None)
        if alarm is not None:
            alarm.ring(f"rank {group.rank} of {group.size} failed: {found[0]}")
    everyone = gather_objects(found, group)
    if error is not None:
        raise error
    for rank, (problem, _) in enumerate(everyone):
        if problem is not None:
            raise OtherRankError(f"rank {rank} of {group.size} failed: {problem}")
    for rank, (_, others) in enumerate(everyone):
        if others != found[1]:
            raise ValueError(
                f"rank {rank} of {group.size} has another model, checkpoint, plan or size than rank {group.rank}, or "
                f"other versions of its libraries"
            )
    return result


def fingerprint(model: nn.Module, resolved: Resolved, others: Sequence[str] = ()) -> str:
    """A digest of the model, the resolved plan, and `others`.

    Of the model: its class and config, its parameters' names, full shapes and dtypes, and which of them are on meta.
    """
    parts = [type(model).__name__, str(resolved.size), f"uneven {resolved.uneven}", str(resolved.specs), *others]
    parts.append(_config(model))
    parts += [f"{path}: {label(style)}" for path, style in resolved.styles.items()]
    for name, value in model.named_parameters():
        spec = resolved.specs.get(name)
        # Of a sharded model the ranks may hold unequal parts.
        shape = tuple(value.shape) if spec is None else spec.full_shape(value.shape)
        parts.append(f"{name}: {shape} {value.dtype} {value.is_meta}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _config(model: nn.Module) -> str:
    """What a model's config says of its numbers, not of where it was read or by which version."""
    config: Any = getattr(model, "config", None)
    config = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(config, Mapping):
        return ""
    told = {str(key): value for key, value in config.items() if not str(key).startswith("_")}
    told.pop("transformers_version", None)
    return json.dumps(sorted(told.items()), skipkeys=True, default=lambda value: type(value).__name__)


def require_equal(tensors: Mapping[str, torch.Tensor], group: Group) -> None:
    """The ranks hold the same whole `tensors`, as far as a sample of each one's elements tells. None may be empty.

    Ranks with other weights would each contribute a shard of another model, and the output still looks sane.

    Raises:
        ValueError: one differs, on every rank.
    """
    names = [name for name, tensor in tensors.items() if not tensor.is_meta]
    if not names or group.process_group is None:
        return
    digests = torch.stack([_digest(tensors[name]).to(group.device) for name in names])
    # The maximum of d and of -d agree where all ranks have the same d.
    highest, lowest = largest(digests, group), -largest(-digests, group)
    differing = (highest != lowest).nonzero()
    if differing.numel():
        raise ValueError(
            f"the ranks hold different values of '{names[int(differing[0])]}': load the same checkpoint on every rank, "
            f"or seed alike before building the model"
        )


def _digest(parameter: torch.Tensor) -> torch.Tensor:
    flat = parameter.detach().flatten()
    flat = torch.view_as_real(flat).flatten() if flat.is_complex() else flat
    # An odd stride, or a weight of SAMPLES rows would be compared in its first column alone.
    # Infinities of both signs must not add up to a NaN, which equals nothing.
    sample = flat[:: flat.numel() // SAMPLES | 1].double().nan_to_num(0.5, 1e300, -1e300)
    return (sample * torch.arange(1, sample.numel() + 1, device=sample.device)).sum()
