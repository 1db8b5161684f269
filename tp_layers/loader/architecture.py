"""Whether two configs are of one architecture, whatever wrote them."""

import inspect
import json
from collections.abc import Collection
from typing import Any

from torch import nn


def difference(model: nn.Module, there: dict[str, Any], here: dict[str, Any], notes: Collection[str] = ()) -> str:
    """How the config found `there` differs from the one the model writes `here`; empty if only in notes.

    Notes are paths, the versions of libraries, what a transformers config says of running and of generating, and the
    keys in `notes`. A base class of the model's own is no difference.
    """
    if there.get("_class_name") in [base.__name__ for base in type(model).__mro__]:
        there = there | {"_class_name": type(model).__name__}
    old, new = (_essence(it, notes) for it in (_completed(model, there), _completed(model, here)))
    # A transformers config says all its class knows of: what the other lacks comes from elsewhere.
    keys = [key for key in new if key in old] if hasattr(model, "_from_config") else [*new, *old]
    for key in keys:
        if key not in old or key not in new or old[key] != new[key]:
            found, own = (repr(config.get(key, "nothing")) for config in (old, new))
            return f"'{key}' is {found} there, {own} here"
    return ""


def _essence(config: Any, notes: Collection[str]) -> Any:
    if not isinstance(config, dict):
        return config
    named = [key for key in config if key == "_class_name" or not key.startswith("_")]
    return {key: _essence(config[key], notes) for key in named if key not in ("transformers_version", *notes)}


def _completed(model: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The config with all that it leaves unsaid: a published one is often older than an argument of its class."""
    if hasattr(model, "save_config"):
        parameters = inspect.signature(type(model).__init__).parameters.values()
        known = {item.name: item.default for item in parameters if item.default is not inspect.Parameter.empty}
        # As a file would have them: lists for tuples.
        return {**json.loads(json.dumps(known, default=str)), **config}
    if hasattr(model, "_from_config"):
        return _of_transformers(type(model.config), config)
    return config


def _of_transformers(config_class: Any, config: dict[str, Any]) -> dict[str, Any]:
    """What its class makes of the config, and what only its class knows of. The dtype says how weights are stored."""
    from transformers import PreTrainedConfig

    general = {*PreTrainedConfig().to_dict(), "use_cache"} - {"dtype", "architectures"}
    # Unknown is such as what older files say of generation.
    known = {*config_class().to_dict(), "dtype", "architectures"}
    made = {key: value for key, value in config_class.from_dict(dict(config)).to_dict().items() if key in known}

    def own(part: Any) -> Any:
        if not isinstance(part, dict):
            return part
        return {key: own(part[key]) for key in part if key not in general and not key.endswith("_token_id")}

    return own(made)
