"""The names of the collectives that run within a context."""

from torch.utils._python_dispatch import TorchDispatchMode


class Calls(TorchDispatchMode):
    """Names every collective that runs within: `with Calls() as calls: ...`, then `calls.names`."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))
