"""Within these, a model is built without weights: parameters on meta, buffers and plain tensor attributes real."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

# What changes meanwhile belongs to the whole process.
_BUILDING = threading.RLock()


@contextmanager
def building(dtype: torch.dtype | None) -> Iterator[None]:
    """A parameter moves to meta the moment a module registers it; `dtype` is the default one, if it can be that.

    Under `torch.device("meta")` buffers and plain tensor attributes (rotary tables) would stay meta too. A parameter
    that is registered a second time is tied, and becomes the same object again.
    """
    moved = WeakIdKeyDictionary()

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            if param not in moved:
                moved[param] = nn.Parameter(param.detach().to("meta"), param.requires_grad)
            param = moved[param]
        register(self, name, param)

    with _BUILDING, replaced(nn.Module, "register_parameter", register_on_meta) as register:
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype if dtype is not None and dtype not in FLOAT8 else before)
        try:
            yield
        finally:
            torch.set_default_dtype(before)


def built(model: nn.Module) -> nn.Module:
    """The `model` in eval mode.

    Raises:
        ValueError: a buffer was computed from parameters, and is on meta too.
    """
    computed = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if computed:
        raise ValueError(f"{type(model).__name__} computes its buffers {computed} from parameters: use tp_layers.apply")
    return model.eval()


@contextmanager
def replaced(owner: type, name: str, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """For this thread a method of a class is another; others build models meanwhile. Yields the original."""
    original, builder = getattr(owner, name), threading.get_ident()

    def method(*args: Any, **kwargs: Any) -> Any:
        return (function if threading.get_ident() == builder else original)(*args, **kwargs)

    setattr(owner, name, method)
    try:
        yield original
    finally:
        setattr(owner, name, original)
