"""Published names that transformers renames while loading, by its own conversion mapping."""

from typing import Any

from .snapshot import Source


def rename_entries(model: Any, entries: dict[str, Source]) -> dict[str, Source]:
    """The entries of a checkpoint under the names of the transformers `model`.

    Names the mapping does not know, or that are of no tensor of the model, stay as the mapping leaves them.

    Raises:
        ValueError: a tensor of the model is merged, split or otherwise computed from those of the checkpoint, or two
            tensors get one name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [step for step in mapping if isinstance(step, WeightRenaming)]
    converters = [step for step in mapping if isinstance(step, WeightConverter)]
    state, prefix, what = model.state_dict(), model.base_model_prefix, type(model).__name__
    found: dict[str, Source] = {}
    origin: dict[str, str] = {}
    # In the order in which transformers goes through them: some renamings depend on the names before.
    for name in sorted(entries, key=dot_natural_key):
        new, converted = rename_source_key(name, renamings, converters, prefix, state)
        if new not in state and name in state:
            new, converted = rename_source_key(name, [], [], prefix, state)
        if converted is not None and new in state:
            operations = [step.operations for step in converters if converted in step.source_patterns]
            raise ValueError(
                f"'{name}' of the checkpoint becomes '{new}' of {what} by {operations[0]}, not by a new name alone: "
                f"load it with from_pretrained, save it with save_original_format=False, and load that"
            )
        if new in found:
            raise ValueError(f"'{origin[new]}' and '{name}' of the checkpoint are both '{new}' of {what}")
        found[new], origin[new] = entries[name], name
    return found
