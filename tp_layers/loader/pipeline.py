"""`load` for the folder of a pipeline: sharded components by themselves, the others by diffusers, nothing twice."""

import importlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..agree import agreed, fingerprint
from ..group import Group
from ..layers.options import Options
from ..plans.overlap import check_overlap
from ..plans.refuse import refuse_planned
from ..plans.registry import plan_for
from ..plans.resolve import resolve
from ..plans.shard import sharding_of
from .components import PipelineReport, check_names, must_fit, report_of, settle, why_whole
from .folder import find_folder
from .load import describe_checkpoint, load_model, refuse_arguments
from .pretrained import main_dtype
from .snapshot import read_sources

logger = logging.getLogger(__name__)
LIBRARIES = ("diffusers", "transformers")
How = Mapping[str, Any]


class Wanted(NamedTuple):
    """What is asked for of a pipeline's components; `others`: those that are there already, and what is refused."""

    components: Sequence[str] | None
    plans: Mapping[str, Any]
    dtypes: torch.dtype | Mapping[str, torch.dtype] | None
    others: Mapping[str, Any]

    def dtype(self, name: str) -> torch.dtype | None:
        """Of a component."""
        if isinstance(self.dtypes, Mapping):
            return self.dtypes.get(name, self.dtypes.get("default"))
        return self.dtypes

    def plan(self, name: str, model: nn.Module) -> Mapping[str, Any]:
        """The caller's for this component, else that of its class."""
        own = self.plans.get(name)
        return plan_for(model) if own is None else own


class _Found(NamedTuple):
    classes: dict[str, type[nn.Module]]
    whole: dict[str, str]
    facts: list[Any]


def load_pipeline(pipeline_class: Any, path: str | Path, wanted: Wanted, how: How) -> tuple[Any, PipelineReport]:
    """The pipeline at `path`, its planned components sharded; all of them are checked before the first one is read.

    `how`: the keywords of `load_model` that are the same for all components, the group among them.

    Raises:
        ValueError: as in `load`, with the name of the component; or a component is named that is not there.
    """
    group: Group = how["group"]
    found = agreed(group, lambda: _look(pipeline_class, path, wanted, how), lambda it: (it.facts, it.whole))
    parts: dict[str, nn.Module] = {}
    for name, cls in found.classes.items():
        plan, dtype = wanted.plans.get(name), wanted.dtype(name)
        parts[name], _ = load_model(cls, path, subfolder=name, plan=plan, dtype=dtype, report=False, **how)
    pipeline = agreed(group, lambda: _assemble(pipeline_class, path, wanted, found, parts, how))
    device = group.device if how["device"] is None else torch.empty(0, device=how["device"]).device
    agreed(group, lambda: settle(pipeline, device))
    given = dict.fromkeys(wanted.others, "given as it is")
    report = report_of(pipeline, group, {**given, **found.whole})
    logger.info("%s", report)
    return pipeline, report


def _look(pipeline_class: Any, path: str | Path, wanted: Wanted, how: How) -> _Found:
    """Which components are to be sharded, and why the others stay whole."""
    Options(how["backend"], how["reduce_dtype"], fuse=how["fuse"])
    check_overlap(how["overlap"])
    group, index = how["group"], pipeline_class.load_config(path, revision=how["revision"])
    refuse_arguments({name: value for name, value in wanted.others.items() if name not in index})
    for name, model in wanted.others.items():
        _check_given(name, model, group)
    classes = {name: cls for name, value in index.items() if (cls := _class(value)) and name not in wanted.others}
    check_names(classes, wanted.components, wanted.plans)
    found = _Found({}, {}, [])
    for name, cls in classes.items():
        named = wanted.components is not None or wanted.plans.get(name) is not None
        if wanted.components is not None and name not in wanted.components:
            found.whole[name] = "not among components="
        elif not named and hasattr(cls, "save_config") and not must_fit(cls):
            found.whole[name] = why_whole(name, cls)
        else:
            _look_at(name, cls, path, wanted, how, found, named or must_fit(cls))
    return found


def _check_given(name: str, model: Any, group: Group) -> None:
    """A model that the caller hands over may be whole, but not over other ranks."""
    if not isinstance(model, nn.Module):
        return
    sharding = sharding_of(model)
    if sharding is None and must_fit(type(model)):
        logger.warning("'%s' was given whole, and stays so on every rank: load or shard it first", name)
    if sharding is not None and sharding.group.process_group != group.process_group:
        raise ValueError(f"'{name}' is sharded over another group of ranks")


def _look_at(
    name: str, cls: type[nn.Module], path: str | Path, wanted: Wanted, how: How, found: _Found, must: bool
) -> None:
    """Checks one component, and adds it to those that are to be sharded or, unless it `must` be, to the whole ones."""
    model: nn.Module | None = None
    try:
        folder = find_folder(path, name, how["variant"], how["revision"])
        model, _ = describe_checkpoint(cls, folder, wanted.dtype(name), how["variant"], how["check"])
        plan = wanted.plan(name, model)
        resolved = resolve(model, plan, how["group"].size, check=how["check"], uneven=how["uneven"])
        refuse_planned(model, resolved)
    except (ValueError, OSError) as error:
        if must:
            raise type(error)(f"component '{name}': {error}") from error
        found.whole[name] = why_whole(name, cls if model is None else model, error)
    else:
        found.classes[name] = cls
        found.facts.append((name, fingerprint(model, resolved)))


def _class(value: Any) -> type[nn.Module] | None:
    """The model class of an entry of `model_index.json`, None for what is no model, or of another library."""
    if not (isinstance(value, list | tuple) and len(value) == 2 and value[0] in LIBRARIES):
        return None
    cls = getattr(importlib.import_module(value[0]), value[1], None)
    return cls if isinstance(cls, type) and issubclass(cls, nn.Module) else None


def _assemble(
    pipeline_class: Any, path: str | Path, wanted: Wanted, found: _Found, parts: Mapping[str, Any], how: How
) -> Any:
    """The pipeline, the components that are not there yet read by diffusers, in the dtypes that `load` would give."""
    where = {"variant": how["variant"], "revision": how["revision"]}
    dtypes = {name: wanted.dtype(name) or _stored_dtype(path, name, **where) for name in found.whole}
    known = {name: dtype for name, dtype in dtypes.items() if dtype is not None}
    return pipeline_class.from_pretrained(path, dtype=known, **where, **wanted.others, **parts)


def _stored_dtype(path: str | Path, name: str, variant: str | None, revision: str | None) -> torch.dtype | None:
    """In which most bytes of a component's weights are stored; None where they are not in safetensors files."""
    try:
        return main_dtype(read_sources(find_folder(path, name, variant, revision), variant))
    except (OSError, ValueError):
        return None
