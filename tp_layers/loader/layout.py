"""Under which names diffusers and transformers keep the weights of a model, without a variant and of one ("fp16")."""

import re
from collections.abc import Iterable

STEMS = DIFFUSERS, TRANSFORMERS = ("diffusion_pytorch_model", "model")
# Files that hold weights and cannot be read in slices.
OTHERS = (".bin", ".pt", ".pth", ".ckpt", ".gguf")
# The variant in the name of a single file (not in that of one of several), of an index, and of an old index.
VARIANT = re.compile(
    rf"(?:{'|'.join(STEMS)})(?:\.(?P<single>.+)(?<!-\d{{5}}-of-\d{{5}})\.safetensors"
    r"|\.safetensors\.index\.(?P<index>.+)\.json|\.safetensors\.(?P<old>.+)\.index\.json)"
)


def first_files(variant: str | None) -> list[str]:
    """The single files and indices a checkpoint may begin with, in the order in which each library looks for its own.

    Raises:
        ValueError: `variant` is no part of a file name.
    """
    if variant is not None and not re.fullmatch(r"[\w-]+(\.[\w-]+)*", variant):
        raise ValueError(f"variant must be the part of a file name that stands for it, such as 'fp16', got {variant!r}")
    dot = "" if variant is None else f".{variant}"
    return [
        f"{DIFFUSERS}.safetensors.index{dot}.json",
        # An index of a variant as diffusers named it once, and still reads it.
        *([f"{DIFFUSERS}.safetensors{dot}.index.json"] if dot else []),
        f"{DIFFUSERS}{dot}.safetensors",
        f"{TRANSFORMERS}{dot}.safetensors",
        f"{TRANSFORMERS}.safetensors.index{dot}.json",
    ]


def nothing_found(files: Iterable[str], variant: str | None, where: object) -> str:
    """What to say where none of `first_files` is among `files`, the names in `where`."""
    files = sorted(files)
    found = sorted({next(filter(None, match.groups())) for match in map(VARIANT.fullmatch, files) if match})
    there = [f"variant={name!r}" for name in found]
    if variant is not None and set(files) & set(first_files(None)):
        there.insert(0, "variant=None")
    others = [name for name in files if name.endswith(OTHERS)]
    what = "" if variant is None else f" of variant {variant!r}"
    hint = f"; there are those of {', '.join(there)}" if there else ""
    if others and not there:
        hint = f"; it has {others}, which cannot be read in slices: convert them to safetensors"
    return f"no safetensors weights{what} ({' or '.join(STEMS)}) in {where}{hint}"
