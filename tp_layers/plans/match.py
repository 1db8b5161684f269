"""From the keys of a plan to the modules (or bare parameters) of a model."""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from .styles import Style, style_of


@dataclass(frozen=True)
class Match:
    """One module, or one bare parameter, that a key of the plan names."""

    path: str
    key: str
    style: Style
    target: nn.Module | nn.Parameter

    @property
    def splits(self) -> bool:
        """Whether it takes a whole tensor and returns a split one, as a colwise projection does."""
        return self.style.input == "whole" and self.style.output == "split"

    @property
    def takes(self) -> bool:
        """Whether it takes a split tensor and returns a whole one, or a partial sum, as a rowwise projection does."""
        return self.style.input == "split" and self.style.output in ("whole", "partial")

    @property
    def block(self) -> str:
        """The path of the block that the key's last `*` names; "" is the model itself.

        Where the `*` names the planned module itself, the block is what holds the list.
        """
        atoms = self.key.removesuffix("?").split(".")
        if "*" not in atoms:
            return ""
        last = len(atoms) - 1 - atoms[::-1].index("*")
        depth = last + 1 if last < len(atoms) - 1 else last - 1
        return ".".join(self.path.split(".")[: max(depth, 0)])


def match(model: nn.Module, plan: Mapping[str, Any]) -> list[Match]:
    """Every module the plan names, in the plan's order.

    `*` stands for one component of a path, any number of times. A block that lacks an optional module is skipped; a key
    that ends with `?` may match nothing at all, for what only some configs of a class have.

    Raises:
        ValueError: an unknown style, a key that matches nothing anywhere, two keys for one module, or one module at
            two planned paths.
    """
    if not isinstance(plan, Mapping):
        raise ValueError(f"a plan maps module paths to styles, got a {type(plan).__name__}")
    if not plan:
        raise ValueError(f"the plan for {type(model).__name__} is empty: nothing would be sharded")
    found: dict[str, Match] = {}
    targets: dict[int, Match] = {}
    for key, value in plan.items():
        try:
            style = style_of(value)
        except ValueError as error:
            raise ValueError(f"plan key '{key}': {error}") from None
        atoms = key.removesuffix("?").split(".")
        matches = [Match(path, key, style, target) for path, target in _walk(model, atoms, "")]
        if not matches and not key.endswith("?"):
            raise ValueError(_nothing(model, key))
        for item in matches:
            other = found.setdefault(item.path, item)
            if other is not item:
                raise ValueError(f"the plan keys '{other.key}' and '{key}' both name '{item.path}': drop one of them")
            other = targets.setdefault(id(item.target), item)
            if other is not item:
                raise ValueError(
                    f"'{other.path}' and '{item.path}' are one and the same, and would be sharded twice: name one"
                )
    return list(found.values())


def _walk(module: nn.Module, atoms: list[str], path: str) -> Iterator[tuple[str, nn.Module | nn.Parameter]]:
    atom, rest = atoms[0], atoms[1:]
    if not rest and atom in module._parameters and module._parameters[atom] is not None:
        yield f"{path}.{atom}".lstrip("."), module._parameters[atom]  # type: ignore[misc]
    if not rest and atom in getattr(module, "parametrizations", ()):
        where = f"{path}.{atom}".lstrip(".")
        raise ValueError(f"'{where}' is parametrised, so it is computed; remove the parametrisation first")
    # Not named_children(), which leaves out the second name of a module.
    for name, child in module._modules.items():
        if child is None or atom not in ("*", name):
            continue
        where = f"{path}.{name}".lstrip(".")
        if rest:
            yield from _walk(child, rest, where)
        else:
            yield where, child


def _nothing(model: nn.Module, key: str) -> str:
    # Numbers stand for list entries: the paths of the model in the notation of a plan, to find the nearest to the key.
    paths = {".".join("*" if atom.isdigit() else atom for atom in name.split(".")) for name, _ in model.named_modules()}
    near = difflib.get_close_matches(key, paths, n=1)
    hint = f"; the nearest path is '{near[0]}'" if near else ""
    return f"the plan key '{key}' matches nothing in {type(model).__name__}{hint}"
