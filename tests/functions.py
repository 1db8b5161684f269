"""The functions of torch that are called within a context."""

from collections import Counter
from typing import Any

from torch.overrides import TorchFunctionMode


class Functions(TorchFunctionMode):
    """Counts them by name: `with Functions() as functions: ...`, then `functions.counts["linear"]`."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))
