"""LoRA adapters drawn at random, the files that they are saved as, and full models with them fused."""

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from seeded import noise

# For a layer: lora_A [r, K], lora_B [N, r], and a bias of B or None.
Lora = dict[str, tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]


def draw(model: nn.Module, ranks: Iterable[int] = (4,), *, bias: bool = False, seed: int = 0, only: str = "") -> Lora:
    """Adapters for all linear layers whose path ends with `only`, of the `ranks` in turn, as large as weights are."""
    found: Lora = {}
    of = list(ranks)
    layers = {path: it for path, it in model.named_modules() if isinstance(it, nn.Linear) and path.endswith(only)}
    for number, (path, layer) in enumerate(layers.items()):
        r, start = of[number % len(of)], 1000 * seed + 3 * number
        down = noise(r, layer.in_features, seed=start) / layer.in_features**0.5
        up = noise(layer.out_features, r, seed=start + 1) / r**0.5
        found[path] = down, up, 0.3 * noise(layer.out_features, seed=start + 2) if bias else None
    return found


def keys(
    lora: Lora, prefix: str = "transformer.", sides: tuple[str, str] = ("lora_A", "lora_B")
) -> dict[str, torch.Tensor]:
    """As a file has them."""
    state = {}
    for path, (down, up, bias) in lora.items():
        state[f"{prefix}{path}.{sides[0]}.weight"], state[f"{prefix}{path}.{sides[1]}.weight"] = down, up
        if bias is not None:
            state[f"{prefix}{path}.{sides[1]}.bias"] = bias
    return state


def write(path: Path, state: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """A safetensors file; its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {key: tensor.contiguous().clone() for key, tensor in state.items()}
    save_file(own, path, dict(metadata) if metadata else None)
    return str(path)


@torch.no_grad()
def fused(model: nn.Module, *adapters: tuple[Lora, float | Mapping[str, float]]) -> nn.Module:
    """The full `model` with `factor * B @ A` added to its weights, in float64 and rounded once, in place."""
    totals = {path: it.weight.double() for path, it in model.named_modules() if isinstance(it, nn.Linear)}
    for lora, factor in adapters:
        for path, (down, up, bias) in lora.items():
            times = factor if isinstance(factor, float | int) else factor[path]
            totals[path] = totals[path] + times * up.double() @ down.double()
            if bias is not None:
                own = model.get_submodule(path).bias
                own.copy_(own.double() + times * bias.double())
    for path, total in totals.items():
        model.get_submodule(path).weight.copy_(total)
    return model
