"""A LoRA from its file: for each layer the two matrices, and by what their product is multiplied."""

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from ..layers.low_rank import LowRank
from .adapter_classes import loader_of
from .adapter_keys import Found, Key, component_of, in_peft_keys, own_keys
from .adapter_scale import CONFIG, Config, read_configs
from .folder import naming

logger = logging.getLogger(__name__)
# The weights' files of a folder: diffusers' and PEFT's.
NAMES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")


class Adapter(NamedTuple):
    """A whole adapter: a `LowRank` for each layer, by the layer's path, and a `digest` of the files it is from."""

    file: Path
    layers: dict[str, LowRank]
    digest: str


def find_file(path: str | Path) -> Path:
    """The safetensors file of an adapter: `path` itself, or the one in the folder `path`.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is no safetensors file, or there are several.
    """
    place = Path(path)
    if place.is_file():
        if place.suffix != ".safetensors":
            raise ValueError(f"{place} is no safetensors file: convert the adapter first")
        return place
    if not place.is_dir():
        raise FileNotFoundError(f"{place} is neither a file nor a folder; download an adapter of the hub first")
    there = sorted(file.name for file in place.glob("*.safetensors"))
    known = [name for name in there if name in NAMES] or there
    if len(known) > 1:
        raise ValueError(f"{place} has several adapters, {', '.join(known)}: name one of these files")
    if not known:
        raise FileNotFoundError(f"{place} has no adapter: neither {' nor '.join(NAMES)}")
    return place / known[0]


def read_adapter(model: nn.Module, path: str | Path) -> Adapter:
    """The adapter at `path` for `model`, its tensors whole, on the CPU and as they are stored.

    Raises:
        ValueError: it is no LoRA, in a format that is not known, not for this model, or its files contradict each
            other.
        FileNotFoundError: there is none.
    """
    file = find_file(path)
    with naming(file):
        try:
            stored = load_file(file)
        except SafetensorError as error:
            raise ValueError(f"it is not a whole safetensors file: {error}") from error
        component = component_of(model, stored)
        mine, others = own_keys(model, stored, component)
        if not mine:
            raise ValueError(f"it has nothing for a {type(model).__name__}, its keys are {_some(others)}")
        configs = read_configs(file, component, _has_alpha_in_header(model))
        tensors = {key: stored[key] for key in mine}
        if configs and (alphas := [key for key in mine if key.endswith("alpha")]):
            raise ValueError(f"both '{alphas[0]}' and {configs[0].where} say how it is scaled")
        layers = _layers(in_peft_keys(model, tensors, component), tensors, configs)
    if others:
        logger.warning("%s: skipped %d keys for other components: %s", file, len(others), _some(others))
    return Adapter(file, layers, _digest(file))


def _layers(
    found: Mapping[Key, Found], stored: Mapping[str, torch.Tensor], configs: list[Config]
) -> dict[str, LowRank]:
    layers = {}
    for path in dict.fromkeys(key.layer for key in found):
        parts = {what: found.get(Key(path, what)) for what in ("A", "B", "bias", "alpha")}
        down, up, bias, alpha = parts.values()
        if down is None or up is None:
            there = next(key for it in parts.values() if it is not None for key in sorted(it.sources))
            raise ValueError(f"'{path}' lacks lora_{'A' if down is None else 'B'}: there is only '{there}'")
        a, b = down.tensor, up.tensor
        if a.dim() != 2 or b.dim() != 2 or a.shape[0] != b.shape[1] or not a.shape[0]:
            raise ValueError(
                f"'{path}' has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)}, which are not [r, K] and [N, r] of "
                f"one r: only LoRA of linear layers is supported"
            )
        if alpha is not None:
            if alpha.tensor.numel() != 1:
                raise ValueError(f"the alpha of '{path}' has shape {tuple(alpha.tensor.shape)}: it must be one number")
            scaling = float(alpha.tensor) / a.shape[0]
        else:
            scaling = _scaling(path, sorted(down.sources), stored, configs)
        layers[path] = LowRank(a, b, None if bias is None else bias.tensor, scaling)
    return layers


def _scaling(path: str, sources: list[str], stored: Mapping[str, torch.Tensor], configs: list[Config]) -> float:
    """By the configs, which speak of the layers as the file does."""
    told = {
        config.scaling(_layer_of(source), stored[source].shape[0])
        for config in configs
        for source in sources
        if stored[source].dim() > 1
    }
    if len(told) > 1:
        raise ValueError(
            f"'{path}' is scaled by {' or '.join(map(str, sorted(told)))}, as its files contradict each other"
        )
    return told.pop() if told else 1.0


def _layer_of(source: str) -> str:
    name = source.removeprefix("base_model.model.")
    for prefix in ("transformer.", "text_encoder.", "diffusion_model."):
        name = name.removeprefix(prefix)
    return name.partition(".lora")[0]


def _has_alpha_in_header(model: nn.Module) -> bool:
    """Whether the header's `alpha` counts, as diffusers has it for one class."""
    return loader_of(model) == "MiniMaxH3LoraLoaderMixin"


def _digest(file: Path) -> str:
    digest = hashlib.blake2b()
    with file.open("rb") as stream:
        digest.update(hashlib.file_digest(stream, "blake2b").digest())
    beside = file.parent / CONFIG
    digest.update(beside.read_bytes() if beside.is_file() else b"")
    return digest.hexdigest()


def _some(keys: list[str]) -> str:
    return ", ".join(f"'{key}'" for key in keys[:3]) + (", ..." if len(keys) > 3 else "")
