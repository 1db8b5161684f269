"""Which blocks of a sharded model sum two streams by one all-reduce: FLUX.2's double blocks (`layers/flux2.py`).

As with fused blocks, what a module's code must be is known by the code's digest. A block whose code is another, or that
has a processor or a forward of its own, keeps an all-reduce for each stream. So do all of them where gradients are on,
under torch.compile, autocast and inference mode, where sums are overlapped, and with `fuse=False`.
"""

from typing import Any

from torch import nn

from ..group import Group
from ..layers.flux2 import FusedTextFeedForward, JointAttention, TextFeedForward, double_block
from ..layers.fused import Forward, FusedSwiGLU
from ..layers.linear import RowwiseLinear
from ..layers.streams import Streams
from .fuse import digest, of_diffusers

# Of the sources that `layers/flux2.py` does the same as.
BLOCK = "b5d26783a67cbd6d"
PROCESSOR = "2106c36979e28f30"
FEED_FORWARD = "af59d2fda364f00c"


def join_streams(model: nn.Module, group: Group) -> list[str]:
    """From now on those blocks of a sharded model do so. Returns their paths, which must be the same on all ranks."""
    ways = {"Flux2Attention": _join_attention, "Flux2TransformerBlock": _join_block}
    found = [(path, module, ways.get(of_diffusers(module))) for path, module in model.named_modules()]
    return [path for path, module, join in found if group.size > 1 and join is not None and join(module)]


def along(model: nn.Module) -> set[str]:
    """Paths of layers whose sums go along with another layer's, in inference; `model` may be sharded or whole."""
    found = set()
    for path, module in model.named_modules():
        kind: Any = type(module)
        if of_diffusers(module) == "Flux2TransformerBlock" and digest(kind.forward) == BLOCK:
            found |= {f"{path}.attn.to_add_out", f"{path}.ff_context.linear_out"}
    return found


def _join_attention(attention: Any) -> bool:
    theirs = attention.processor
    if of_diffusers(theirs) != "Flux2AttnProcessor" or digest(type(theirs).__call__) != PROCESSOR:
        return False
    if not _joined(attention._modules.get("to_add_out"), attention.to_out[0]):
        return False
    ours = JointAttention()
    # An attention backend that was set before.
    vars(ours).update(vars(theirs))
    attention.set_processor(ours)
    return True


def _join_block(block: Any) -> bool:
    text = block.ff_context
    if "forward" in vars(block) or digest(type(block).forward) != BLOCK or "forward" in vars(text):
        return False
    kind = FusedTextFeedForward if type(text) is FusedSwiGLU else TextFeedForward
    if kind is TextFeedForward and digest(type(text).forward) != FEED_FORWARD:
        return False
    if not _joined(block.ff.linear_out, text.linear_out):
        return False
    text.__class__ = kind
    # Its class stays: step caches and compile_repeated_blocks go by it.
    block.__dict__["forward"] = Forward(double_block, block)
    return True


def _joined(first: Any, second: Any) -> bool:
    """Makes the two layers sum together, if they are such layers."""
    fit = all(isinstance(layer, RowwiseLinear) and not layer.split_input for layer in (first, second))
    if fit:
        Streams(first, second)
    return fit
