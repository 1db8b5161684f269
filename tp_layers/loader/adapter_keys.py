"""The keys of an adapter file, in whatever format, as those of PEFT: `layer.lora_A.weight` and its like.

Keys that name the model's own modules are taken as they are, with or without the component of a pipeline in front
(`transformer.`). All others go through the converter that diffusers' pipelines have for the class (kohya, BFL, xlabs,
ComfyUI, ai-toolkit, ...). What a converter leaves out of what it returns is found by tracing (see `traced.py`) and
refused.
"""

import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from .adapter_classes import loader_of
from .pretrained import is_pretrained
from .traced import trace, untraced

# Of kinds that are no low-rank product alone, a part of the key of each.
KINDS = {
    "lora_magnitude_vector": "DoRA",
    "dora_scale": "DoRA",
    "lokr_": "LoKr",
    "hada_": "LoHa",
    "oft_": "OFT",
    "lora_mid": "LoCon with a middle matrix",
    "lora_embedding_": "LoRA of an embedding",
}
COMPONENT = re.compile(r"(?:base_model\.model\.)?(transformer(?:_2|_ref)?|text_encoder(?:_\d)?|unet|connectors)\.")
TEXT_ENCODERS = re.compile(
    r"lora_te\d?_|text_encoders\.|text_model\.|text_conditioner\.|diffusion_model\.llm_adapter\."
)
SIDE = re.compile(r"(?P<layer>.+?)\.(?P<side>lora_A|lora_B|lora_down|lora_up)(\.default)?\.(?P<what>weight|bias)")
ALPHA = re.compile(r"(?P<layer>.+?)(\.lora_[AB]|\.lora_down|\.lora_up)?(\.weight)?\.alpha")


class Key(NamedTuple):
    """What a key stands for: "A", "B", "bias" (of B) or "alpha" of a `layer`, a module's path."""

    layer: str
    what: str


class Found(NamedTuple):
    """One tensor of an adapter, and the keys of the file that it was made of."""

    tensor: torch.Tensor
    sources: frozenset[str]


def parse(key: str) -> Key | None:
    """What a key of PEFT's format, or of kohya's endings, stands for; None for any other."""
    if match := SIDE.fullmatch(key):
        side = "A" if match["side"] in ("lora_A", "lora_down") else "B"
        if match["what"] == "weight" or side == "B":
            return Key(match["layer"], side if match["what"] == "weight" else "bias")
    elif match := ALPHA.fullmatch(key):
        return Key(match["layer"], "alpha")
    return None


def component_of(model: nn.Module, keys: Iterable[str]) -> str:
    """The pipeline's component for which `keys` are meant that are meant for the model.

    Raises:
        ValueError: there are several.
    """
    family = "text_encoder" if is_pretrained(model) else "transformer"
    there = sorted({name for key in keys if (name := _component(model, key)) and name.startswith(family)})
    if len(there) > 1:
        raise ValueError(f"it has keys for {' and for '.join(there)}: make a file of each")
    return there[0] if there else family


def own_keys(model: nn.Module, keys: Iterable[str], component: str) -> tuple[list[str], list[str]]:
    """The `keys` that are for the model, and those for other components of a pipeline.

    Raises:
        ValueError: one is of another kind of adapter.
    """
    mine: list[str] = []
    others: list[str] = []
    for key in keys:
        of = _component(model, key)
        text = of is None and not is_pretrained(model) and TEXT_ENCODERS.match(key)
        (others if text or (of is not None and of != component) else mine).append(key)
    for key in mine:
        for part, kind in KINDS.items():
            if part in key:
                raise ValueError(f"'{key}' is of a {kind} adapter, and only LoRA is supported: fuse it first")
    return mine, others


def in_peft_keys(model: nn.Module, tensors: Mapping[str, torch.Tensor], component: str) -> dict[Key, Found]:
    """An adapter's tensors by what they stand for in the model.

    Raises:
        ValueError: a key is in a format that diffusers has no converter for, or that its converter refuses or drops.
    """
    renamed = _renamed({key: Found(tensor, frozenset([key])) for key, tensor in tensors.items()})
    loader = loader_of(model)
    if loader is not None and not _are_own_names(model, renamed, component):
        renamed = _renamed(_converted(loader, tensors))
    found: dict[Key, Found] = {}
    for name, it in renamed.items():
        key = parse(name)
        if key is None:
            raise ValueError(f"'{name}' is no key of a LoRA that is supported: lora_A, lora_B and alpha are")
        layer = _stripped(model, key.layer, component)
        if Key(layer, key.what) in found:
            raise ValueError(f"'{name}' is there twice for '{layer}'")
        found[Key(layer, key.what)] = it
    return found


def _component(model: nn.Module, key: str) -> str | None:
    match = COMPONENT.match(key)
    # A module of the model's own may be called as a component is.
    return match[1] if match and match[1] not in model._modules else None


def _stripped(model: nn.Module, layer: str, component: str) -> str:
    prefixes = ["base_model.model.", f"{component}."]
    if loader_of(model) is None:
        prefixes.append("diffusion_model.")
    for prefix in prefixes:
        if prefix[:-1] not in model._modules:
            layer = layer.removeprefix(prefix)
    return layer


def _are_own_names(model: nn.Module, keys: Iterable[str], component: str) -> bool:
    modules = dict(model.named_modules())
    parsed = [parse(key) for key in keys]
    return all(key is not None and _stripped(model, key.layer, component) in modules for key in parsed)


def _renamed(tensors: dict[str, Found]) -> dict[str, Found]:
    """With the names that diffusers gave LoRA before it used PEFT's, such as `to_q.lora.down`, replaced."""
    if not any(".lora." in key or "_lora." in key for key in tensors):
        return tensors
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    converted: dict[str, Found] = convert_unet_state_dict_to_peft(tensors)
    return converted


def _converted(loader: str, tensors: Mapping[str, torch.Tensor]) -> dict[str, Found]:
    """What diffusers' `loader` makes of the tensors.

    Raises:
        ValueError: it fails, or leaves out a tensor that is not zero, or an alpha.
    """
    from diffusers.loaders import lora_pipeline

    if any(key.endswith("alpha") for key in tensors):
        # A converter multiplies by alpha / r in the dtype that it is given.
        tensors = {key: tensor.float() for key, tensor in tensors.items()}
    traced, read = trace(tensors)
    convert: Any = getattr(lora_pipeline, loader).lora_state_dict
    alphas = {"return_alphas": True} if "return_alphas" in inspect.signature(convert).parameters else {}
    try:
        result = convert(traced, **alphas)
    except Exception as error:
        # Whatever a converter makes of keys that it does not know.
        told = f"{type(error).__name__}: {error}"
        raise ValueError(f"diffusers' {loader} cannot convert its keys ({next(iter(tensors))}, ...): {told}") from error
    state, network = result[:2] if alphas else (result, None)
    found = {key: Found(*untraced(tensor)) for key, tensor in {**state, **(network or {})}.items()}
    # Of a matrix, a number is read to see whether it is zero.
    numbers = [key for key in read if tensors[key].numel() == 1]
    used = frozenset(numbers).union(*(it.sources for it in found.values()))
    dropped = [key for key in tensors if key not in used and not _is_nothing(key, tensors)]
    if dropped:
        raise ValueError(
            f"diffusers' {loader} drops '{dropped[0]}' ({len(dropped)} such keys): the result would differ"
        )
    return found


def _is_nothing(key: str, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether this changes nothing: a difference of zero, or an alpha that is the rank."""
    if key.endswith(".alpha"):
        layer = key.removesuffix("alpha")
        downs = [tensors[name] for side in ("lora_down", "lora_A") if (name := f"{layer}{side}.weight") in tensors]
        return tensors[key].numel() == 1 and any(float(tensors[key]) == down.shape[0] for down in downs)
    return ("lora" in key or ".diff" in key) and not tensors[key].any()
