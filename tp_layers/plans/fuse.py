"""Fused blocks: which modules of a sharded model compute in fewer passes, found by their classes.

    FeedForward (GELU, GEGLU, SwiGLU, SiLU)     the activation within the first projection
    FLUX.2's and FLUX.3's FeedForward           the same
    attention with to_q, to_k, to_v             one GEMM for those that take the same input; add_q_proj.. likewise
    FLUX.1's single block                       the MLP's projection in that GEMM, its GELU within; no cat
    FLUX.2's parallel attention                 q, k, v and the gated MLP from its one projection; no cat

What a module's code must be is known by the code's digest: a block whose forward is another is left as it is, with a
note. So is one with a processor of its own.
"""

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from ..group import Group
from ..kernels.backend import fuses
from ..layers import flux2
from ..layers.epilogue import Activation, Gated
from ..layers.fused import GELU_TANH, Forward, FusedProjection, FusedSwiGLU, single_block
from ..layers.linear import ColwiseLinear, RowwiseLinear
from ..layers.options import Options
from ..layers.together import Call, compute_together, watch_call
from .lint import pattern
from .refuse import HOOKS

# Of the sources that `layers/fused.py` and `layers/flux2.py` do the same as: FLUX.1's single block (LongCat-Image has a
# copy of it), FLUX.2's, and its processor.
SINGLE_BLOCK = "57350a6dab842b40"
FLUX2_SINGLE_BLOCK = "e1baa440356a9b3a"
PARALLEL = "18a20dca47451835"
# Attention whose processors give one input to all three projections, where neither `is_cross_attention` nor a second
# stream's projections say so; keys and values have the same input in every class.
SELF_ATTENTION = {
    "BriaAttention",
    "BriaFiboAttention",
    "ErnieImageAttention",
    "Flux2Attention",
    "Flux3Attention",
    "FluxAttention",
    "HiDreamAttention",
    "Ideogram4Attention",
    "Krea2Attention",
    "LongCatImageAttention",
    "MiniMaxH3Attention",
    "MotifVideoAttention",
    "OvisImageAttention",
    "QwenImage21Attention",
}
SWIGLU = {"Flux2FeedForward": "Flux2SwiGLU", "Flux3FeedForward": "Flux3SwiGLU"}
_OWN_FORWARD = "it has a forward of its own"
_HOOKED = "its activation has hooks, and would not be called"
_OTHER_CODE = "its code is another than the fused one was written for"


def fuse_blocks(model: nn.Module, group: Group, options: Options) -> list[str]:
    """Fuses the blocks of a sharded model that holds its weights, and returns a note for those left as they are.

    With `options.fuse` None, only where that is faster on the device of its parameters, or of the group.
    """
    devices = {group.device.type, *(parameter.device.type for parameter in model.parameters())}
    wanted = any(map(fuses, devices)) if options.fuse is None else options.fuse
    notes, call = {}, Call()
    for path, module in list(model.named_modules()) if wanted else []:
        reasons = [_HOOKED] if _is_hooked(module) else [fuse(module, call) for fuse in _KINDS]
        for reason in filter(None, reasons):
            notes[f"'{pattern(path)}' is not fused: {reason}"] = True
    watch_call(model, call)
    return list(notes)


def of_diffusers(thing: Any) -> str:
    """The class's name, if it is one of diffusers."""
    kind = type(thing)
    return kind.__name__ if kind.__module__.startswith("diffusers.") else ""


@functools.cache
def digest(function: Callable[..., Any]) -> str:
    """Of a function's source; nothing if that is not to be had."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def _colwise(layer: Any, blocks: int) -> bool:
    """Whether it is a colwise layer of so many blocks, the last two of which, if there are several, are a gate's."""
    fits = isinstance(layer, ColwiseLinear) and not layer.gather and len(layer.spec.blocks) == blocks
    return fits and len(set(layer.spec.blocks[-2:])) == 1


def _activation(module: Any) -> Activation | Gated | None:
    """What a first layer of `FeedForward` does after its projection; None if the module is none."""
    name = of_diffusers(module)
    if name == "GELU":
        known = {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
        return Activation(known) if known else None
    if name == "GEGLU":
        return Gated("gelu", gate_first=False)
    if name in ("SwiGLU", "LinearActivation") and type(module.activation) is nn.SiLU:
        return Gated("silu", gate_first=False) if name == "SwiGLU" else Activation("silu")
    return None


def _fuse_projection(module: Any, call: Call) -> str | None:
    epilogue = _activation(module)
    if epilogue is None or not _colwise(module.proj, 2 if isinstance(epilogue, Gated) else 1):
        return None
    reason = _become(module, FusedProjection)
    module.epilogue = epilogue
    return reason


def _fuse_swiglu(module: Any, call: Call) -> str | None:
    name = SWIGLU.get(of_diffusers(module))
    if name is None or of_diffusers(module.act_fn) != name or not _colwise(module.linear_in, 2):
        return None
    return _become(module, FusedSwiGLU)


def _fuse_single_block(module: Any, call: Call) -> str | None:
    if not of_diffusers(module).endswith("SingleTransformerBlock"):
        return None
    if digest(type(module).forward) != SINGLE_BLOCK:
        return _OTHER_CODE if of_diffusers(module) == "FluxSingleTransformerBlock" else None
    gelu = type(module.act_mlp) is nn.GELU and module.act_mlp.approximate == "tanh"
    if not gelu or not _colwise(module.proj_mlp, 1) or not _takes_two(module.proj_out):
        return None
    if "forward" in vars(module):
        return _OWN_FORWARD
    # Its class stays: step caches and compile_repeated_blocks go by it.
    module.__dict__["forward"] = Forward(single_block, module)
    layers = [module.attn._modules.get(name) for name in next(iter(_same_input(module.attn)), ())]
    _join(call, [*layers, module.proj_mlp], [*(None for _ in layers), GELU_TANH])
    return None


def _fuse_flux2_single_block(module: Any, call: Call) -> str | None:
    if of_diffusers(module) != "Flux2SingleTransformerBlock":
        return None
    if digest(type(module).forward) != FLUX2_SINGLE_BLOCK:
        return _OTHER_CODE
    if "forward" in vars(module):
        return _OWN_FORWARD
    module.__dict__["forward"] = Forward(flux2.single_block, module)
    return None


def _is_hooked(module: Any) -> bool:
    """Whether the activation that a fused block computes within a projection has hooks."""
    found = [module._modules.get(name) for name in ("act_mlp", "act_fn", "activation", "mlp_act_fn")]
    return any(getattr(activation, hooks) for activation in found if activation is not None for hooks in HOOKS)


def _takes_two(layer: Any) -> bool:
    return isinstance(layer, RowwiseLinear) and not layer.split_input and len(layer.parts) == 2


def _fuse_parallel(module: Any, call: Call) -> str | None:
    if of_diffusers(module) != "Flux2ParallelSelfAttention":
        return None
    gated = module.mlp_mult_factor == 2 and of_diffusers(module.mlp_act_fn) == "Flux2SwiGLU"
    if not gated or not _colwise(module.to_qkv_mlp_proj, 5) or not _takes_two(module.to_out):
        return None
    theirs = module.processor
    if of_diffusers(theirs) != "Flux2ParallelSelfAttnProcessor":
        return f"its processor is a {type(theirs).__name__}"
    if digest(type(theirs).__call__) != PARALLEL:
        return _OTHER_CODE
    ours = flux2.ParallelSelfAttention()
    # An attention backend that was set before.
    vars(ours).update(vars(theirs))
    module.set_processor(ours)
    return None


def _fuse_attention(module: Any, call: Call) -> str | None:
    for names in _same_input(module):
        layers = [module._modules.get(name) for name in names]
        _join(call, layers, [None] * len(layers))
    return None


def _same_input(module: Any) -> list[tuple[str, ...]]:
    """The projections of an attention that take one input."""
    has = module._modules
    if "to_k" not in has or "to_v" not in has or getattr(module, "fused_projections", False):
        return []
    second = all(has.get(f"add_{name}_proj") is not None for name in "qkv")
    cross = getattr(module, "is_cross_attention", None)
    whole = second or cross is False or (cross is None and of_diffusers(module) in SELF_ATTENTION)
    return [
        ("to_q", "to_k", "to_v") if whole else ("to_k", "to_v"),
        ("add_q_proj", "add_k_proj", "add_v_proj") if second else ("add_k_proj", "add_v_proj"),
    ]


def _join(call: Call, layers: Sequence[Any], epilogues: Sequence[Activation | None]) -> None:
    """Has `layers` computed together, if they can be."""
    alike = all(_colwise(layer, 1) and layer.ranges is None and layer.together is None for layer in layers)
    if (
        alike
        and len(layers) > 1
        and len({(layer.in_features, layer.bias is None, layer.options) for layer in layers}) == 1
    ):
        compute_together(call, layers, epilogues)


def _become(module: nn.Module, kind: type[nn.Module]) -> str | None:
    if "forward" in vars(module):
        return _OWN_FORWARD
    # As it is, with its hooks. A forward of its own would be guarded by torch.compile, in each block by itself.
    module.__class__ = kind
    return None


_KINDS = (_fuse_projection, _fuse_swiglu, _fuse_single_block, _fuse_flux2_single_block, _fuse_parallel, _fuse_attention)
