"""By what the product of an adapter's two matrices is multiplied: alpha over rank, as the adapter's own files say.

alpha tensors (`layer.alpha`)                        alpha / r
PEFT's adapter_config.json, and the same in the      lora_alpha / r, or / sqrt(r) with use_rslora; a layer that
header of a file that diffusers wrote                matches a key of alpha_pattern has that alpha
neither                                              1, as of diffusers' files from before it wrote the header
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

HEADER = "lora_adapter_metadata"
CONFIG = "adapter_config.json"
# PEFT's own defaults.
RANK, ALPHA = 8, 8
# Entries that change what the two matrices mean, or add something else; none of them is on by default.
UNSUPPORTED = (
    "alora_invocation_tokens", "arrow_config", "corda_config", "layer_replication", "loftq_config", "modules_to_save",
    "target_parameters", "trainable_token_indices", "use_bdlora", "use_dora", "use_qalora",
)  # fmt: skip
# Initialisations that also change the weights of the model the adapter is for.
CHANGES_WEIGHTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class Config:
    """A LoRA config of PEFT, from the file `where`."""

    where: str
    entries: Mapping[str, Any]

    def check(self) -> None:
        """Raises ValueError if the adapter is another kind of adapter than a plain LoRA."""
        kind = self.entries.get("peft_type", "LORA")
        if str(kind).rpartition(".")[2] != "LORA":
            raise ValueError(f"{self.where} describes a {kind} adapter: only LoRA is supported; fuse it first")
        for name in UNSUPPORTED:
            if self.entries.get(name):
                raise ValueError(f"{self.where} has {name}={self.entries[name]!r}, which is not supported")
        start = str(self.entries.get("init_lora_weights", ""))
        if start.lower().startswith(CHANGES_WEIGHTS):
            raise ValueError(
                f"{self.where} has init_lora_weights='{start}', for which the model's own weights were changed: "
                f"convert the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...)"
            )

    def scaling(self, layer: str, rank: int) -> float:
        """Of a `layer`, whose matrices have that `rank`.

        Raises:
            ValueError: the config says another rank.
        """
        told = self._of(layer, "rank_pattern", self.entries.get("r", RANK))
        if told not in (None, rank):
            raise ValueError(f"'{layer}' has rank {rank}, {self.where} says {told}")
        alpha = self._of(layer, "alpha_pattern", self.entries.get("lora_alpha", ALPHA))
        return float(alpha) / (rank**0.5 if self.entries.get("use_rslora") else rank)

    def _of(self, layer: str, patterns: str, otherwise: Any) -> Any:
        """As PEFT finds it: the first pattern that the end of the layer's path matches."""
        for pattern, value in (self.entries.get(patterns) or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", layer):
                return value
        return otherwise


def read_configs(file: Path, component: str, header_alpha: bool = False) -> list[Config]:
    """What is written of an adapter file's scale: beside it by PEFT, and in its header by diffusers.

    `component`: of the pipeline, whose entries of the header are taken. `header_alpha`: an `alpha` in the header is
    that of every layer, whatever its rank.

    Raises:
        ValueError: it is not JSON, or describes another kind of adapter.
    """
    found = []
    beside = file.parent / CONFIG
    if beside.is_file() and (file.name == "adapter_model.safetensors" or len(list(_others(file))) == 0):
        found.append(Config(str(beside), _parsed(beside.read_bytes(), str(beside))))
    with safe_open(file, framework="pt") as opened:
        header = opened.metadata() or {}
    if text := header.get(HEADER):
        where = f"the header of {file}"
        entries = _parsed(text, where)
        own = {key.removeprefix(f"{component}."): it for key, it in entries.items() if key.startswith(f"{component}.")}
        if own:
            found.append(Config(where, own))
    elif header_alpha and "alpha" in header:
        found.append(Config(f"the header of {file}", {"lora_alpha": header["alpha"], "r": None}))
    for config in found:
        config.check()
    return found


def _others(file: Path) -> list[Path]:
    return [other for other in file.parent.glob("*.safetensors") if other.name != file.name]


def _parsed(text: str | bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"{where} holds a {type(parsed).__name__}, not the config of an adapter")
    return parsed
