"""AdaLN modulations: Linears of a few rows (one per image) that hold up to 39 % of a model's weights.

A plan calls them "modulation". Sharded, they are `"colwise_gather"`: against `"rowwise_split_input"` it moves half the
bytes (an all-gather of a row against its all-reduce), and every element is one dot product as on one device.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from .match import match

MODULATION = "modulation"
CHOICES = ("auto", "sharded", "whole")
# Below this share of the parameters, a collective more per block costs more than the memory is worth.
SHARE = 0.05


def with_modulation(model: nn.Module, plan: Mapping[str, Any], choice: str = "auto") -> Mapping[str, Any]:
    """`plan` with a style in the place of every "modulation"; itself, if it has none.

    Raises:
        ValueError: `choice` is not in `CHOICES`, or a key of a modulation matches nothing.
    """
    if choice not in CHOICES:
        raise ValueError(f"modulation must be one of {', '.join(map(repr, CHOICES))}, got {choice!r}")
    keys = [key for key, value in plan.items() if isinstance(value, str) and value == MODULATION]
    if not keys:
        return plan
    sharded = choice == "sharded" or (choice == "auto" and _share(model, keys) > SHARE)
    style = "colwise_gather" if sharded else "replicate"
    return {key: style if key in keys else value for key, value in plan.items()}


def _share(model: nn.Module, keys: list[str]) -> float:
    """Of the parameters of `model`, those of the modules that `keys` name."""
    layers = [
        item.target for item in match(model, dict.fromkeys(keys, "replicate")) if isinstance(item.target, nn.Module)
    ]
    own, total = (sum(it.numel() for layer in some for it in layer.parameters()) for some in (layers, [model]))
    return own / max(total, 1)
