"""Models of transformers: built as its `from_pretrained` builds them, but for the weights.

A class is known by its marks, as importing transformers takes seconds that a diffusers model does not need.
"""

import logging
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..layers.options import is_wide_float
from .meta import building, built, replaced
from .rename import rename_entries
from .snapshot import Source
from .ties import same_bytes

logger = logging.getLogger(__name__)


def is_pretrained(model: Any) -> bool:
    """Whether this is a model of transformers, or a class of its models."""
    return hasattr(model, "config_class") and hasattr(model, "_from_config")


def describe_pretrained(
    model_class: Any, folder: Path, entries: dict[str, Source], dtype: torch.dtype | None
) -> tuple[nn.Module, dict[str, Source]]:
    """The model of the checkpoint in `folder`, and its `entries` under the model's names, tied ones once."""
    model = build_pretrained(model_class, folder, dtype or main_dtype(entries))
    return model, _settle_ties(model, rename_entries(model, entries))


def build_pretrained(model_class: Any, folder: Path, dtype: torch.dtype | None) -> nn.Module:
    """The model of the config in `folder`, parameters on meta in `dtype`, all else as `from_pretrained` makes it.

    Tied parameters are one object, whatever the checkpoint holds.

    Raises:
        ValueError: the weights are in files that the config names.
    """
    from transformers import PreTrainedModel

    config = model_class.config_class.from_pretrained(folder, local_files_only=True)
    elsewhere = getattr(config, "transformers_weights", None) or getattr(type(config), "extra_files", None)
    if elsewhere:
        raise ValueError(f"{model_class.__name__} has weights in {elsewhere}: load it whole and call tp_layers.apply")
    with building(dtype):
        # Each submodel would be initialised, then the whole.
        with replaced(PreTrainedModel, "init_weights", lambda self: None):
            model = model_class._from_config(config, dtype=torch.get_default_dtype())
        model.tie_weights(recompute_mapping=False)
    _initialise_buffers(model)
    _set_generation_config(model, folder)
    return built(model)


def _initialise_buffers(model: Any) -> None:
    """Gives buffers the values of `from_pretrained`, should the checkpoint not hold them: those of `_init_weights`.

    It runs outside of the model's default dtype, so that a table in bfloat16 is computed in float32 and cast.
    """
    for parameter in model.parameters():
        # transformers' own mark of what was read.
        parameter._is_hf_initialized = True
    model.initialize_weights()


def _set_generation_config(model: Any, folder: Path) -> None:
    if not (model.can_generate() and hasattr(model, "adjust_generation_fn")):
        return
    config_class = type(model.generation_config)
    try:
        model.generation_config = config_class.from_pretrained(folder, local_files_only=True)
    except OSError:
        model.generation_config = config_class.from_pretrained(
            folder, config_file_name="config.json", _from_model_config=True, local_files_only=True
        )


def main_dtype(entries: dict[str, Source]) -> torch.dtype | None:
    """The floating-point dtype most bytes are stored in, None where a model cannot be built in it."""
    counts: Counter[torch.dtype] = Counter()
    for entry in entries.values():
        counts[entry.dtype] += torch.Size(entry.shape).numel() * entry.dtype.itemsize
    found = [dtype for dtype, _ in counts.most_common() if is_wide_float(dtype)]
    return found[0] if found else None


def final_dtype(model: Any, name: str, stored: torch.dtype, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype a stored tensor is loaded in: its own, or where `dtype` is given, as transformers casts.

    That is float32 for names in which a pattern of `_keep_in_fp32_modules` (float16) or `_keep_in_fp32_modules_strict`
    (float16, bfloat16) is found, for others the dtype they have in the model that was built in `dtype`.
    """
    if dtype is None:
        return stored
    for pattern, kept in model._get_dtype_plan(dtype).items():
        if re.search(pattern.replace("*", ".*"), name):
            return kept
    return model.get_parameter_or_buffer(name).dtype


def _settle_ties(model: Any, entries: dict[str, Source]) -> dict[str, Source]:
    """The entries, and the model's ties, where the checkpoint has several of the tied parameters.

    Equal ones keep one entry. Those that differ are untied, as transformers does, with a warning: the config is wrong.
    To compare them each rank reads both, beside the bytes that the report counts.
    """
    entries = dict(entries)
    for target, source in list(model.all_tied_weights_keys.items()):
        if target not in entries or source not in entries:
            continue
        if same_bytes(entries[target], entries[source]):
            del entries[target]
            continue
        logger.warning("'%s' and '%s' differ in the checkpoint: not tied, whatever the config says", target, source)
        path, _, attribute = target.rpartition(".")
        parameter = model.get_parameter(target)
        setattr(model.get_submodule(path), attribute, nn.Parameter(parameter.detach().clone(), parameter.requires_grad))
        del model.all_tied_weights_keys[target]
    return entries


def once_saved(model: nn.Module, names: list[str]) -> set[str]:
    """Those of `names` that stand for buffers which were saved once: every model of transformers ignores them."""
    buffers = [name for name, _ in model.named_buffers()]
    patterns = {"rotary_emb.inv_freq": r"rotary_emb\.inv_freq", "position_ids": r"(^|\.)position_ids$"}
    there = [pattern for ending, pattern in patterns.items() if any(name.endswith(ending) for name in buffers)]
    return {name for name in names if any(re.search(pattern, name) for pattern in there)}


def name_model(model: Any, path: str | Path) -> None:
    """Notes in the model and its config where it came from, as each library does."""
    if is_pretrained(model):
        model.name_or_path = model.config.name_or_path = str(path)
    else:
        model.register_to_config(_name_or_path=str(path))
