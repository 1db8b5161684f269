"""Whether two configs are of one architecture, whatever wrote them."""

import inspect
import json
from collections.abc import Collection
from typing import Any

from torch import nn


def difference(model: nn.Module, there: dict[str, Any], here: dict[str, Any], notes: Collection[str] = ()) -> str:
    """How the config found `there` differs from the one the model writes `here`; empty if only in notes.

    Notes are paths, the versions of libraries, and the keys in `notes`.
    """
    old, new = _essence({**_defaults(model), **there}, notes), _essence(here, notes)
    for key in [*new, *(key for key in there if key in old)]:
        if key not in old or key not in new or old[key] != new[key]:
            found, own = (repr(config.get(key, "nothing")) for config in (old, new))
            return f"'{key}' is {found} there, {own} here"
    return ""


def _essence(config: Any, notes: Collection[str]) -> Any:
    if not isinstance(config, dict):
        return config
    named = [key for key in config if key == "_class_name" or not key.startswith("_")]
    return {key: _essence(config[key], notes) for key in named if key not in ("transformers_version", *notes)}


def _defaults(model: nn.Module) -> dict[str, Any]:
    """What a diffusers config means by a key it lacks: a published one is often older than an argument of its class."""
    if not hasattr(model, "save_config"):
        return {}
    parameters = inspect.signature(type(model).__init__).parameters.values()
    known = {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}
    # As a file would have them: lists for tuples.
    return json.loads(json.dumps(known, default=str))
