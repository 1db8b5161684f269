"""The repaired interpreter, and the assertion that every test here ran a kernel."""

import numpy as np
import pytest
from interpreter import repair

from tp_layers.kernels.jit.launch import Launch

repair()


@pytest.fixture(autouse=True)
def launched(monkeypatch):
    """The launches of a test; there must be one, or the torch twin was compared with itself."""
    launches = []
    run = Launch.run

    def counted(self, device):
        launches.append(self.kernel.__name__)
        run(self, device)

    monkeypatch.setattr(Launch, "run", counted)
    # exp(-x) of a very negative x is inf, on a GPU too, and its reciprocal 0.
    with np.errstate(over="ignore"):
        yield launches
    assert launches


@pytest.fixture(params=["float32", "bfloat16", "float16"])
def dtype(request):
    import torch

    return getattr(torch, request.param)
