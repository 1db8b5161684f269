"""What a caller wants of a colwise projection beyond its output, so that the kernel can do it in the same pass.

    Activation   act(y) of all blocks
    Gated        act(gate) * up of the two blocks
    Parallel     q, k, v and act(gate) * up of the five blocks, for attention and MLP side by side

`project(x, weight, bias, parts, backend)` computes it from the input, `parts` being the weight's rows of each block;
`after(y, parts)` from the projection's output, for layers that add to it first (adapters). It is the caller that passes
one to the layer, in each call: whoever passes none gets the projection's output.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ..kernels import backend as backends
from ..kernels.colwise import ACTIVATIONS, colwise, colwise_blocks
from ..kernels.gated import gated_colwise

Parts = Sequence[tuple[int, int]]


class Epilogue(Protocol):
    """One of the classes below."""

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: Parts, backend: str | None
    ) -> Any:
        """From `x [.., K]`, which the projection takes."""

    def after(self, y: torch.Tensor, parts: Parts) -> Any:
        """From `y [.., N / size]`, which the projection gives."""


@dataclass(frozen=True)
class Activation:
    """`x [.., K]` -> `[.., N / size]`; `name`: of `kernels.colwise.ACTIVATIONS`."""

    name: str

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: Parts, backend: str | None
    ) -> torch.Tensor:
        """See `Epilogue`."""
        return colwise(x, weight, bias, ranges=parts, activations=[self.name] * len(parts), backend=backend)

    def after(self, y: torch.Tensor, parts: Parts) -> torch.Tensor:
        """See `Epilogue`."""
        return ACTIVATIONS[self.name](y)


@dataclass(frozen=True)
class Gated:
    """`x [.., K]` -> `[.., N / 2 / size]`; the weight is [gate | up] or, without `gate_first`, [up | gate]."""

    name: str
    gate_first: bool

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: Parts, backend: str | None
    ) -> torch.Tensor:
        """See `Epilogue`."""
        first = self.gate_first
        return gated_colwise(x, weight, bias, activation=self.name, gate_first=first, ranges=parts, backend=backend)

    def after(self, y: torch.Tensor, parts: Parts) -> torch.Tensor:
        """See `Epilogue`."""
        first, second = y.chunk(2, -1)
        gate, up = (first, second) if self.gate_first else (second, first)
        return ACTIVATIONS[self.name](gate) * up


@dataclass(frozen=True)
class Parallel:
    """`x [.., K]` -> (q, k, v, act(gate) * up), of a weight [q | k | v | gate | up]."""

    name: str

    def project(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, parts: Parts, backend: str | None
    ) -> tuple[torch.Tensor, ...]:
        """See `Epilogue`."""
        if backends.choose("gated_colwise", x, backend) == "torch":
            # Nothing is saved by a second GEMM.
            return self._of(colwise_blocks(x, weight, bias, ranges=parts, backend=backend, contiguous=False))
        qkv = colwise_blocks(x, weight, bias, ranges=parts[:3], backend=backend, contiguous=False)
        return (*qkv, Gated(self.name, True).project(x, weight, bias, parts[3:], backend))

    def after(self, y: torch.Tensor, parts: Parts) -> tuple[torch.Tensor, ...]:
        """See `Epilogue`."""
        return self._of(y.split([stop - start for start, stop in parts], -1))

    def _of(self, ys: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        query, key, value, gate, up = ys
        return query, key, value, ACTIVATIONS[self.name](gate) * up
