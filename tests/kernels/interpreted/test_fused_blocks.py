"""Blocks of diffusers fused with their Triton kernels, end to end, against the unsharded ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import tp_layers
from tp_layers import PackedColwiseParallel, PackedRowwiseParallel
from tp_layers.group import Group

# The other tests of kernels run without it too, on a machine that has a GPU.
pytest.importorskip("diffusers", exc_type=ImportError)
from diffusers.models.attention import FeedForward
from diffusers.models.transformers.transformer_flux import FluxSingleTransformerBlock
from diffusers.models.transformers.transformer_flux2 import Flux2FeedForward, Flux2SingleTransformerBlock

WIDTH, HEADS, TEXT, IMAGE = 32, 2, 3, 5
HALVES = PackedColwiseParallel([1, 1])
SINGLE = {
    "block.proj_mlp": "colwise",
    "block.proj_out": PackedRowwiseParallel(),
    **{f"block.attn.to_{name}": "colwise" for name in "qkv"},
}
PARALLEL = {"block.attn.to_qkv_mlp_proj": PackedColwiseParallel(), "block.attn.to_out": PackedRowwiseParallel()}


def rotary() -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.linspace(0, 3, (TEXT + IMAGE) * WIDTH // HEADS).view(-1, WIDTH // HEADS)
    return angles.cos(), angles.sin()


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def feed_forward(kind: str) -> tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any]]:
    first = HALVES if "glu" in kind else "colwise"
    plan = {"block.net.0.proj": first, "block.net.2": "rowwise"}
    return lambda: FeedForward(WIDTH, activation_fn=kind), plan, {"hidden_states": draw(2, 4, WIDTH, seed=1)}


SEQUENCES = {
    "hidden_states": draw(2, IMAGE, WIDTH, seed=1),
    "encoder_hidden_states": draw(2, TEXT, WIDTH, seed=2),
    "image_rotary_emb": rotary(),
}
# How to build it, its plan, its inputs; and the kernels of one call.
CASES = {
    kind: (*feed_forward(kind), {"gated_kernel" if "glu" in kind else "colwise_kernel", "rowwise_kernel"})
    for kind in ("gelu", "gelu-approximate", "geglu", "swiglu", "linear-silu")
} | {
    "FLUX.2's feed-forward": (
        lambda: Flux2FeedForward(WIDTH, bias=True),
        {"block.linear_in": HALVES, "block.linear_out": "rowwise"},
        {"x": draw(2, 4, WIDTH, seed=1)},
        {"gated_kernel", "rowwise_kernel"},
    ),
    "FLUX.1's single block": (
        lambda: FluxSingleTransformerBlock(WIDTH, HEADS, WIDTH // HEADS),
        SINGLE,
        {**SEQUENCES, "temb": draw(2, WIDTH, seed=3)},
        {"colwise_kernel", "rowwise_kernel"},
    ),
    "FLUX.2's parallel block": (
        lambda: Flux2SingleTransformerBlock(WIDTH, HEADS, WIDTH // HEADS, bias=True),
        PARALLEL,
        {**SEQUENCES, "temb_mod": draw(2, 1, 3 * WIDTH, seed=3), "split_hidden_states": True},
        {"colwise_kernel", "gated_kernel", "rowwise_kernel"},
    ),
}


class Model(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        for seed, parameter in enumerate(self.parameters()):
            parameter.data = draw(*parameter.shape, seed=seed) / parameter.shape[-1] ** 0.5

    def forward(self, **inputs: Any) -> tuple[torch.Tensor, ...]:
        y = self.block(**inputs)
        return y if isinstance(y, tuple) else (y,)


class Concatenated(TorchFunctionMode):
    """The dims that something was concatenated along."""

    def __init__(self) -> None:
        super().__init__()
        self.dims: list[int] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.cat:
            self.dims.append((kwargs or {}).get("dim", args[1] if len(args) > 1 else 0))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("build", "plan", "inputs", "kernels"), CASES.values(), ids=CASES)
def test_fused_block_equals_the_unsharded_one(launched, build, plan, inputs, kernels):
    single = Model(build())
    model = tp_layers.apply(copy.deepcopy(single), plan, group=Group(), backend="triton", fuse=True)
    with torch.no_grad():
        exact = copy.deepcopy(single).double()(**{name: widened(value) for name, value in inputs.items()})
        own = single(**inputs)
        with Concatenated() as concatenated:
            found = model(**inputs)
    assert set(launched) == kernels and 2 not in concatenated.dims and -1 not in concatenated.dims
    launches = len(launched)
    # A GEMM for all projections of one input; FLUX.2's parallel one is q, k, v and the MLP.
    assert launches == len(kernels)
    for got, wanted, full in zip(found, own, exact, strict=True):
        error, allowed = (((it.double() - full).norm() / full.norm()) for it in (got, wanted))
        assert error <= 2 * allowed + torch.finfo(torch.float32).eps
    # And with gradients, for which each projection is by itself.
    for got, full in zip(model(**inputs), exact, strict=True):
        assert (got.double() - full).norm() / full.norm() <= 1e-6
    assert len(launched) > launches


def widened(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(widened, value))
    return value.double() if isinstance(value, torch.Tensor) else value
