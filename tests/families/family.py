"""What a test knows of one class: a tiny config, and inputs for its forward."""

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import torch
import transformers
from torch import nn

from close import randomise

Values = dict[str, Any]


def noise(*shape: int, seed: int = 1) -> torch.Tensor:
    """Standard normal numbers, the same for the same seed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def positions(count: int, axes: int) -> torch.Tensor:
    """Position ids `[count, axes]` that differ along the last two axes."""
    ids = torch.zeros(count, axes)
    ids[:, -1], ids[:, -2] = torch.arange(count) % 3, torch.arange(count) // 3
    return ids


@dataclass(frozen=True)
class Family:
    """How to build one tiny model, and what its forward takes.

    `config` maps a number of heads to the class's arguments; `inputs` returns the arguments of `forward`. `variant`
    tells several configs of one class apart. `dead`: parameters that nothing reads in the unsharded model either (the
    text stream ends in the last block). `cancelled`: those that cancel out, as a bias of all keys does in the softmax.
    `fused`: its projections are fused, as by `fuse_qkv_projections()`; drawn anew, the fused ones differ from the
    separate ones beside them. `thorough`: goes through every test there is, not only those of all classes.
    `config_class`: of a class of transformers, which `config` has the arguments of; "": the class is one of diffusers.
    `model`: a subclass whose forward calls the class's more than once, where one call fills a cache for the next.
    """

    name: str
    config: Callable[[int], Values]
    inputs: Callable[[], Values]
    variant: str = ""
    dead: str = "(?!)"
    cancelled: str = "(?!)"
    fused: bool = False
    thorough: bool = False
    config_class: str = ""
    model: type[nn.Module] | None = None

    @property
    def label(self) -> str:
        """The class, and the variant if there are several."""
        return f"{self.name}, {self.variant}" if self.variant else self.name

    @property
    def cls(self) -> Any:
        """The class, of diffusers or of transformers."""
        return getattr(transformers if self.config_class else diffusers, self.name)

    def make(self, heads: int = 4) -> nn.Module:
        """The model as its class initialises it; on the current default device."""
        if self.config_class:
            return self.cls._from_config(getattr(transformers, self.config_class)(**self.config(heads)))
        model = (self.model or self.cls)(**self.config(heads))
        if self.fused:
            model.fuse_qkv_projections()
        return model

    def build(self, heads: int = 4, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model, every parameter drawn, in eval mode, with the dtypes diffusers' from_pretrained would give it."""
        model = randomise(self.make(heads))
        keep = set(getattr(model, "_keep_in_fp32_modules", None) or [])
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data if keep & set(name.split(".")) else parameter.data.to(dtype)
        return model.eval()


def tensors(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in a model's output, in order, however deep they lie."""
    if isinstance(value, torch.Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    return [found for item in value for found in tensors(item)] if isinstance(value, list | tuple) else []


def forward(model: nn.Module, inputs: Values, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The output tensors of one forward call; floating-point inputs in `dtype`."""

    def cast(value: Any) -> Any:
        if isinstance(value, list):
            return [cast(item) for item in value]
        return value.to(dtype) if dtype and isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return tensors(model(**{name: cast(value) for name, value in inputs.items()}, return_dict=False))


def run(model: nn.Module, inputs: Values, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The same without gradients."""
    with torch.no_grad():
        return forward(model, inputs, dtype)


def backward(model: nn.Module, inputs: Values, dtype: torch.dtype, calls: int = 1) -> dict[str, torch.Tensor | None]:
    """Each parameter's gradient of a fixed weighted sum of the outputs, accumulated over `calls`."""
    for _ in range(calls):
        outputs = forward(model, inputs, dtype)
        weights = [torch.linspace(-1, 1, item.numel(), dtype=dtype).view(item.shape) for item in outputs]
        sum((item * weight).sum() for item, weight in zip(outputs, weights, strict=True)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def digest(outputs: list[torch.Tensor]) -> int:
    """One number that differs where any bit of the outputs does."""
    return zlib.crc32(b"".join(tensor.contiguous().view(torch.uint8).numpy().tobytes() for tensor in outputs))
