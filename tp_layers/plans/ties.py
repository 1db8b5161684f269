"""Tied parameters: one tensor under several names. They are sharded together, or not at all."""

from collections.abc import Mapping

from torch import nn

from .spec import ShardSpec


def names_of(model: nn.Module) -> dict[int, list[str]]:
    """By the identity of a parameter: all of its names."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return found


def tied(model: nn.Module, specs: Mapping[str, ShardSpec]) -> list[list[str]]:
    """The names of each planned parameter that has several."""
    return [names for names in names_of(model).values() if len(names) > 1 and set(names) <= set(specs)]


def tie(model: nn.Module, names: list[str]) -> None:
    """Makes the shards under these `names`, which are equal, one parameter again."""
    shard = model.get_parameter(names[0])
    for name in names[1:]:
        path, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(path), attribute, shard)
