"""What a plan forgot: large weights that stay whole on every rank without the plan saying so."""

import re
from collections.abc import Collection, Sequence

from torch import nn

# Of the model's parameters, summed over blocks; and how many elements a weight must have to be called large.
SHARE = 0.01
LARGE = 1 << 20


def pattern(name: str) -> str:
    """`name` with `*` for every number in it: how a plan would name it in all blocks."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def left_whole(model: nn.Module, sharded: Collection[str], meant: Sequence[str]) -> list[str]:
    """A note for every large weight, of two or more dims, neither `sharded` nor at a path `meant` to be whole."""
    total, sums = 0, dict[str, int]()
    for name, parameter in model.named_parameters():
        total += parameter.numel()
        said = any(name == path or name.startswith(f"{path}.") for path in meant)
        if parameter.dim() > 1 and parameter.numel() >= LARGE and name not in sharded and not said:
            sums[pattern(name)] = sums.get(pattern(name), 0) + parameter.numel()
    return [
        f"'{name}' ({count / total:.1%} of the parameters) stays whole on every rank: shard it, or name its module "
        f'"replicate" in the plan'
        for name, count in sums.items()
        if count > SHARE * total
    ]
