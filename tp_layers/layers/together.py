"""Colwise layers that take the same input, as one GEMM: q, k and v, and the MLP beside them.

Their parameters stay, with their names, as views of one buffer. The first of them that is called with a tensor
computes all; the others return their part if they are called with that very tensor, unchanged, within the same call of
the model. In any other case each computes its own: where something may be differentiated, where a layer has an adapter,
under torch.compile, which cannot see where parameters lie, and in inference mode, in which changes are not counted.

Nothing is kept between calls, and no joined weight either: where the parameters lie is looked at each time. If they
were moved (by `.to()`, a copy of the model, `load_state_dict(assign=True)`), each to memory of its own, they are joined
again; if they are part of something else (a mapped file), they stay there, and the layers compute separately.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..collectives import refuse_tangent
from ..kernels.colwise import colwise_blocks
from ..kernels.contract import needs_grad
from .epilogue import Activation

if TYPE_CHECKING:
    from .linear import ColwiseLinear

NAMES = ("weight", "bias")


class Call:
    """Whether the model is being called, and the groups of layers that forget that when it ends."""

    def __init__(self) -> None:
        self.open = False
        self.groups: list[Together] = []

    def set(self, open_: bool) -> None:
        """A call of the model begins, or ends."""
        self.open = open_
        for group in self.groups:
            group.forget()


class Together:
    """What the layers know of each other within one call of the model.

    `epilogues`: what each layer is called with, an `Activation` or None.
    """

    def __init__(self, call: Call, layers: Sequence["ColwiseLinear"], epilogues: Sequence[Activation | None]) -> None:
        self.call, self.layers, self.epilogues = call, list(layers), list(epilogues)
        self.rows = list(pairwise(accumulate((layer.local for layer in layers), initial=0)))
        self.x: torch.Tensor | None = None
        self.version = -1
        self.outputs: list[torch.Tensor | None] = []

    def take(self, layer: "ColwiseLinear", x: torch.Tensor, epilogue: Any) -> torch.Tensor | None:
        """The layer's output for `x`; None if it has to compute that itself."""
        if torch.compiler.is_compiling() or not self.call.open:
            return None
        place = self.layers.index(layer)
        if epilogue != self.epilogues[place]:
            return None
        if x is not self.x or x._version != self.version:
            if not self._can(x):
                return None
            refuse_tangent(x)
            self.x, self.version, self.outputs = x, x._version, list(self._compute(x))
        # Once: whoever asks again gets a tensor of its own, as the first may have been changed.
        y, self.outputs[place] = self.outputs[place], None
        if all(output is None for output in self.outputs):
            self.forget()
        return y

    def forget(self) -> None:
        """Lets go of input and outputs."""
        self.x, self.outputs = None, []

    def parameters(self, name: str) -> list[nn.Parameter]:
        """The layers' weights, or their biases if they have them."""
        found = [layer._parameters.get(name) for layer in self.layers]
        return [parameter for parameter in found if parameter is not None]

    def join(self) -> bool:
        """Makes the parameters views of one buffer, and returns whether they are."""
        return all(self._join(self.parameters(name)) for name in NAMES)

    def _join(self, parameters: list[nn.Parameter]) -> bool:
        if are_adjacent(parameters):
            return True
        first = parameters[0]
        for parameter in parameters:
            alike = parameter.dtype == first.dtype and parameter.device == first.device
            # Else it is part of something else, which would no longer be read; or shared by two layers.
            own = parameter.is_contiguous() and parameter.untyped_storage().nbytes() == parameter.nbytes
            if not (alike and own) or parameter.is_meta or parameter.is_inference():
                return False
        if len({id(parameter) for parameter in parameters}) < len(parameters):
            return False
        with torch.inference_mode(False), torch.no_grad():
            joined = first.new_empty((self.rows[-1][1], *first.shape[1:]))
            for parameter, (start, stop) in zip(parameters, self.rows, strict=True):
                parameter.data = joined[start:stop].copy_(parameter)
        return True

    def _can(self, x: torch.Tensor) -> bool:
        """Whether all layers may be computed at once, for `x`."""
        if x.is_inference() or any(getattr(layer, "adapters", None) for layer in self.layers):
            return False
        weights, biases = map(self.parameters, NAMES)
        # Others are computed (parametrised, pruned), or stand in for them for a while (torch.func, fake tensors).
        plain = all(type(parameter) is nn.Parameter for parameter in (*weights, *biases))
        if not plain or len(weights) < len(self.layers) or len(biases) not in (0, len(self.layers)):
            return False
        return x.dtype == weights[0].dtype and not needs_grad(x, *weights, *biases) and self.join()

    def _compute(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight, *bias = [self._joined(self.parameters(name)) for name in NAMES if self.parameters(name)]
        return colwise_blocks(
            x,
            weight,
            bias[0] if bias else None,
            ranges=self.rows,
            activations=[None if epilogue is None else epilogue.name for epilogue in self.epilogues],
            backend=self.layers[0].options.backend,
            contiguous=False,
        )

    def _joined(self, parameters: list[nn.Parameter]) -> torch.Tensor:
        """The buffer of which the parameters are views."""
        first = parameters[0].detach()
        return first.as_strided((self.rows[-1][1], *first.shape[1:]), first.stride())


def are_adjacent(parameters: Sequence[torch.Tensor]) -> bool:
    """Whether each lies in the same storage, right behind the one before it."""
    if not parameters:
        return True
    first = parameters[0]
    at, offset = first.data_ptr(), first.storage_offset()
    for parameter in parameters:
        # With the offset, so that two storages which happen to be neighbours are not taken for one.
        here = parameter.data_ptr() == at and parameter.storage_offset() == offset
        if not here or parameter.dtype != first.dtype or not parameter.is_contiguous():
            return False
        at, offset = at + parameter.nbytes, offset + parameter.numel()
    return True


class _Set:
    """The hook before a call of the model, or after it, even if it raises."""

    def __init__(self, call: Call, open_: bool) -> None:
        self.call, self.open = call, open_

    def __call__(self, *args: Any) -> None:
        if not torch.compiler.is_compiling():
            self.call.set(self.open)


def compute_together(call: Call, layers: Sequence["ColwiseLinear"], epilogues: Sequence[Activation | None]) -> None:
    """From now on `layers` are computed at once where they take the same input, within a `call`."""
    together = Together(call, layers, epilogues)
    together.join()
    for layer in layers:
        layer.together = together
    call.groups.append(together)


def watch_call(model: nn.Module, call: Call) -> None:
    """Has `call` know when the model is called.

    Its hooks are on the model, not on each attention: torch.compile would compile every block by itself, as hooks have
    numbers.
    """
    if call.groups:
        model.register_forward_pre_hook(_Set(call, True))
        model.register_forward_hook(_Set(call, False), always_call=True)
