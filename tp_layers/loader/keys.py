"""Which tensors of a checkpoint are the model's own: none may be missing, and none may be of another kind."""

import logging
import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType

import torch
from torch import nn

from ..layers.options import is_wide_float
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
    *,
    in_place: bool = False,
) -> dict[str, Source]:
    """The entries of the model's own tensors, by name, in the order of the files, of tied ones that are equal one.

    `specs` are those of the parameters of which the model holds a shard: the checkpoint has them whole. `in_place`: the
    entries replace values of another checkpoint, in the model's dtypes; else the model takes their dtypes, and a buffer
    that its class allows to be missing keeps its constructor's value.

    Raises:
        ValueError: a tensor is missing from the checkpoint or has another shape or kind there, or (unless `check` is
            False) the checkpoint has tensors that the model lacks and does not name as ignored; or it has several of
            one tied parameter, which differ (`ties` reads them, beside the bytes that a report counts); or, in place,
            one would be cast from or to anything but a floating-point dtype of 16 bits or more.
        OSError: they cannot be read.
    """
    wanted = model.state_dict(keep_vars=True)
    what = type(model).__name__
    missing = _missing(model, wanted, entries, in_place)
    if missing:
        anew = "; load it anew" if in_place and not _missing(model, wanted, entries, False) else ""
        raise ValueError(f"the checkpoint lacks {missing}, which {what} needs{anew}")
    extra = _extra(model, sorted(set(entries) - set(wanted)))
    if extra and check:
        raise ValueError(f"the checkpoint has {extra}, which {what} does not; check=False loads it without them")
    if extra:
        logger.warning("the checkpoint has %s, which %s does not: not read", extra, what)
    kept = {name: entry for name, entry in entries.items() if name in wanted}
    for name, entry in kept.items():
        _check_kind(what, name, wanted[name], entry, specs.get(name), in_place)
    return dict(sorted(keep_one(model, kept).items(), key=lambda item: (str(item[1].file), item[1].offset)))


def _check_kind(
    what: str, name: str, tensor: torch.Tensor, entry: Source, spec: ShardSpec | None, in_place: bool
) -> None:
    shape = tuple(tensor.shape) if spec is None else spec.full_shape(tensor.shape)
    if shape != entry.shape:
        raise ValueError(f"'{name}' is {entry.shape} in the checkpoint, {what} has {shape}")
    if (tensor.is_floating_point(), tensor.is_complex()) != (entry.dtype.is_floating_point, entry.dtype.is_complex):
        raise ValueError(f"'{name}' is {entry.dtype} in the checkpoint, {tensor.dtype} in {what} (quantised?)")
    castable = is_wide_float(tensor.dtype) and is_wide_float(entry.dtype)
    if in_place and tensor.dtype != entry.dtype and not castable:
        raise ValueError(
            f"'{name}' is {entry.dtype} in the checkpoint, {tensor.dtype} in {what}, and is not cast to that: "
            f"load the checkpoint anew"
        )


def _missing(
    model: nn.Module, wanted: dict[str, torch.Tensor], entries: dict[str, Source], in_place: bool
) -> list[str]:
    ties: dict[int, list[str]] = {}
    for name, tensor in wanted.items():
        ties.setdefault(id(tensor), []).append(name)
    # A buffer has the value of its constructor (in place, of another checkpoint), a parameter would have none.
    named = [] if in_place else _matching(model, "missing", wanted)
    ignored = [name for name in named if not isinstance(wanted[name], nn.Parameter)]
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
