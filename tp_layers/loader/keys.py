"""Which tensors of a checkpoint are the model's own: none may be missing, and none may be of another kind."""

import logging
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from ..plans.spec import ShardSpec
from . import pretrained
from .snapshot import Source
from .ties import keep_one

logger = logging.getLogger(__name__)


def check_keys(
    model: nn.Module,
    entries: dict[str, Source],
    check: bool = True,
    specs: Mapping[str, ShardSpec] = MappingProxyType({}),
) -> dict[str, Source]:
    """The entries of the model's own tensors, by name, in the order of the files, of tied ones that are equal one.

    `specs` are those of the parameters of which the model holds a shard: the checkpoint has them whole.

    Raises:
        ValueError: a tensor is missing from the checkpoint or has another shape or kind there, or (unless `check` is
            False) the checkpoint has tensors that the model lacks and does not name as ignored; or it has several of
            one tied parameter, which differ (`ties` reads them, beside the bytes that a report counts).
        OSError: they cannot be read.
    """
    wanted = model.state_dict(keep_vars=True)
    what = type(model).__name__
    missing = _missing(model, wanted, entries)
    if missing:
        raise ValueError(f"the checkpoint lacks {missing}, which {what} needs")
    extra = _extra(model, sorted(set(entries) - set(wanted)))
    if extra and check:
        raise ValueError(f"the checkpoint has {extra}, which {what} does not; check=False loads it without them")
    if extra:
        logger.warning("the checkpoint has %s, which %s does not: not read", extra, what)
    kept = {name: entry for name, entry in entries.items() if name in wanted}
    for name, entry in kept.items():
        tensor, spec = wanted[name], specs.get(name)
        shape = tuple(tensor.shape) if spec is None else spec.full_shape(tensor.shape)
        if shape != entry.shape:
            raise ValueError(f"'{name}' is {entry.shape} in the checkpoint, {what} has {shape}")
        if (tensor.is_floating_point(), tensor.is_complex()) != (entry.dtype.is_floating_point, entry.dtype.is_complex):
            raise ValueError(f"'{name}' is {entry.dtype} in the checkpoint, {tensor.dtype} in {what} (quantised?)")
    return dict(sorted(keep_one(model, kept).items(), key=lambda item: (str(item[1].file), item[1].offset)))


def _missing(model: nn.Module, wanted: dict[str, torch.Tensor], entries: dict[str, Source]) -> list[str]:
    ties: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        ties.setdefault(id(tensor), []).append(name)
    # A buffer has the value of its constructor, a parameter would have none.
    ignored = [name for name in _matching(model, "missing", wanted) if not isinstance(wanted[name], nn.Parameter)]
    return [names[0] for names in ties.values() if not any(name in entries or name in ignored for name in names)]


def _extra(model: nn.Module, names: list[str]) -> list[str]:
    ignored = set(_matching(model, "unexpected", names))
    if pretrained.is_pretrained(model):
        ignored |= pretrained.once_saved(model, names)
    return [name for name in names if name not in ignored]


def _matching(model: nn.Module, kind: str, names: Iterable[str]) -> list[str]:
    """The names that the class lists in `_keys_to_ignore_on_load_missing` or `.._unexpected`."""
    patterns = getattr(model, f"_keys_to_ignore_on_load_{kind}", None) or []
    return [name for name in names if any(re.search(pattern, name) for pattern in patterns)]
