"""Within these, a model is built without weights: parameters on meta, buffers and plain tensor attributes real."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)

LARGE_BYTES = 1 << 20

# The default dtype, which changes meanwhile, and the replaced methods' places belong to the whole process.
_BUILDING = threading.RLock()


@contextmanager
def building(dtype: torch.dtype | None) -> Iterator[None]:
    """A parameter moves to meta the moment a module registers it; `dtype` is the default one, if it can be that.

    Under `torch.device("meta")` buffers and plain tensor attributes (rotary tables) would stay meta too. A parameter
    that is registered a second time is tied, and becomes the same object again.

    Meanwhile the default dtype is that of the whole process: tensors that other threads make without a dtype have it
    too, and of several builders each waits for the one before. The methods are replaced for this thread alone.
    """
    # A meta model of the caller's own may be around this one; what is computed needs a device.
    device = torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext()
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
            with device, _UntouchedZeros():
                yield
        finally:
            torch.set_default_dtype(before)


class _UntouchedZeros(TorchFunctionMode):
    """Large zeros are pages that the system has not mapped yet: writing them costs their size in time and memory.

    Experts' parameters begin as zeros: those of Llama 4 take 3 s and 2.5 GB a layer.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.zeros and set(kwargs) <= {"size", "dtype"} and torch.get_default_device().type == "cpu":
            like = torch.zeros(*args, **kwargs, device="meta")
            if like.nbytes > LARGE_BYTES:
                pages = torch.from_numpy(numpy.zeros(like.nbytes, numpy.uint8))
                return pages.view(like.dtype).view(like.shape)
        return func(*args, **kwargs)


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
