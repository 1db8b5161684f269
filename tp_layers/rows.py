"""How many rows each layer of a diffusion model sees, told from its name: nothing is run.

    once    modulations, and embeddings of time and guidance: one row
    text    what is named after text, or a cross-attention's keys and values
    image   what stands beside such layers in a list of blocks, and what is in no list
    both    blocks without any of these: image and text in one sequence. A text encoder's tokens count as the image's

Audio and conditioning streams count as the image's, text that enters by another name (an `encoder_proj`) too.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
ONCE = {"mod", "modulation", "modulations", "adaln", "time", "timestep", "guidance", "pooled", "pooler", "fps", "shift"}
TEXT = {"text", "txt", "context", "caption", "add", "added"}
IMAGE = {"image", "img", "noise", "visual", "vision"}


@dataclass(frozen=True)
class Tokens:
    """Rows of the image (or video) and of its text in one step. A batch of n takes about n times as long."""

    image: int
    text: int = 0

    def of(self, kind: str) -> int:
        """The rows of a layer of this kind: "once", "text", "image" or "both"."""
        return {"once": 1, "text": self.text, "image": self.image, "both": self.image + self.text}[kind]

    def together(self, kinds: Iterable[str]) -> int:
        """The rows of layers of these kinds in one sequence, without those of one row."""
        found = set(kinds) - {"once"}
        return self.of("both") if "both" in found else sum(self.of(kind) for kind in found)


class Rows:
    """The kind of rows that each module or parameter of `model` sees, by its path."""

    def __init__(self, model: nn.Module) -> None:
        self._crossing = {path for path, module in model.named_modules() if _is_cross(path, module)}
        paths = [path for path, module in model.named_modules() if isinstance(module, LAYERS)]
        # The lists of blocks into which text comes by itself: the rest of each is of the image alone.
        self._two_streams = {_list(path) for path in paths if self._named(path) == "text"}

    def kind(self, path: str) -> str:
        """Of the module or parameter at `path`."""
        named = self._named(path)
        if named:
            return named
        blocks = _list(path)
        return "image" if not blocks or blocks in self._two_streams or IMAGE & set(_words(blocks)) else "both"

    def _named(self, path: str) -> str | None:
        words, (parent, _, name) = set(_words(path)), path.rpartition(".")
        if words & ONCE or path.startswith("t_embedder") or any("norm" in word for word in _words(parent)):
            return "once"
        if words & TEXT or "token_refiner" in path or any(part.endswith("_t") for part in path.split(".")):
            return "text"
        inner = parent in self._crossing and "q" not in name and "out" not in name
        return "text" if inner else None


def _is_cross(path: str, module: nn.Module) -> bool:
    stated = getattr(module, "is_cross_attention", None)
    if isinstance(stated, bool):
        return stated
    name = path.rpartition(".")[2]
    return name.endswith("attn2") or "cross" in _words(name)


def _list(path: str) -> str:
    """The path of the first list on the way to `path`; "": there is none."""
    found = re.match(r"(.*?)\.\d+(\.|$)", path)
    return found.group(1) if found else ""


def _words(path: str) -> list[str]:
    return re.findall(r"[a-z]+", path.lower())
