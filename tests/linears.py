"""The kinds of sharded linear layers that the tests run through, and what a rank holds of a full one's tensors."""

import torch
from torch import nn

from close import randomise
from seeded import integers
from tp_layers.layers.linear import ColwiseLinear, RowwiseLinear
from tp_layers.plans.spec import ShardSpec

SIZES = [1, 2, 3, 4]
FUSED = [2, 1, 1, 3, 3]
# Layer, blocks, and the option of `from_linear`.
KINDS = {
    "colwise": (ColwiseLinear, None, {}),
    "colwise_three_to_one": (ColwiseLinear, [3, 1], {}),
    "colwise_qkv_and_gated_mlp": (ColwiseLinear, FUSED, {}),
    "colwise_gather": (ColwiseLinear, None, {"gather": True}),
    "colwise_gather_three_to_one": (ColwiseLinear, [3, 1], {"gather": True}),
    "rowwise": (RowwiseLinear, None, {}),
    "rowwise_three_to_one": (RowwiseLinear, [3, 1], {}),
    "rowwise_qkv_and_gated_mlp": (RowwiseLinear, FUSED, {}),
    "rowwise_split_input": (RowwiseLinear, None, {"split_input": True}),
    "rowwise_split_input_three_to_one": (RowwiseLinear, [3, 1], {"split_input": True}),
}
ROWWISE = [kind for kind, (layer, _, _) in KINDS.items() if layer is RowwiseLinear]
WHOLE_OUTPUT = [*ROWWISE, "colwise_gather", "colwise_gather_three_to_one"]


def linear_for(kind, size, dtype=torch.float32, *, unit=5, other=7, bias=True, integer=True):
    """A full linear layer for `kind`: its sharded dim has `unit` rows of each proportion on each rank."""
    layer, blocks, _ = KINDS[kind]
    sharded = size * unit * sum(blocks or [1])
    wide, narrow = (other, sharded) if layer is ColwiseLinear else (sharded, other)
    linear = nn.Linear(wide, narrow, bias=bias, dtype=dtype)
    if not integer:
        return randomise(linear)
    with torch.no_grad():
        for seed, parameter in enumerate(linear.parameters()):
            parameter.copy_(integers(*parameter.shape, seed=seed, most=4))
    return linear


def sharded_linear(kind, linear, group):
    layer, blocks, options = KINDS[kind]
    return layer.from_linear(linear, group=group, blocks=blocks, **options)


def part(kind, spec, full, side, group):
    """What a rank holds of `full`, the layer's whole input or output (or its gradient)."""
    layer, _, options = KINDS[kind]
    split = (side == "input") == (layer is RowwiseLinear) and not options
    return ShardSpec(-1, spec.blocks).take(full, group.rank, group.size) if split else full
