"""What operations work on in CPU memory (the largest storage, the most alive at one time), and what a process holds."""

import ctypes
import re
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def resident_bytes() -> int:
    """What this process occupies of memory now, what the C library keeps of freed memory left out."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(re.search(r"VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


class Touched(TorchDispatchMode):
    """Bytes of the largest CPU storage that any operation works on.

    Making an empty tensor is no work (the system maps its memory on the first write), nor is moving it to meta.
    """

    IDLE = ("aten.empty.", "aten.detach.")

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        to_meta = (kwargs or {}).get("device") == torch.device("meta")
        if not to_meta and not str(func).startswith(self.IDLE):
            for item in tree_leaves([args, kwargs or {}, result]):
                if isinstance(item, torch.Tensor) and item.device.type == "cpu":
                    self.nbytes = max(self.nbytes, item.untyped_storage().nbytes())
        return result


class Live(TorchDispatchMode):
    """The most bytes of CPU storages, made by operations since it began, that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = self._storages([args, kwargs])
        result = func(*args, **(kwargs or {}))
        made = {key: value for key, value in self._storages(result).items() if key not in before}
        self._known = {key: held for key, held in (self._known | made).items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._known.values()))
        return result

    @staticmethod
    def _storages(tree: Any) -> dict[int, tuple[StorageWeakRef, int]]:
        tensors = [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor) and item.device.type == "cpu"]
        storages = [tensor.untyped_storage() for tensor in tensors]
        return {storage._cdata: (StorageWeakRef(storage), storage.nbytes()) for storage in storages}
