"""Each operation at a small size, its kernel where there is a GPU and its torch twin: mostly the cost on the host.

make bench
"""

from collections.abc import Callable

import pytest
import torch

from shapes import Case, cases
from variants import variants_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = ("triton", "torch") if DEVICE == "cuda" else ("torch",)
# The first layer of each operation, with two rows.
CASES = {case.operation: case.tiny()._replace(tokens=2) for case in reversed(cases())}

# A second thread costs more to start than these products take.
torch.set_num_threads(1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_operation(benchmark: Callable, case: Case, backend: str):
    run = variants_of(case, DEVICE, torch.bfloat16 if DEVICE == "cuda" else torch.float32)[backend]

    def to_the_end():
        y = run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return y

    with torch.no_grad():
        y = benchmark(to_the_end)
    assert all(part.shape[0] == case.tokens for part in (y if isinstance(y, tuple) else (y,)))
