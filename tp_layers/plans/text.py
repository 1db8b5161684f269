"""Pieces of plans that the text encoders of transformers share."""

from collections.abc import Callable
from typing import Any

from torch import nn

from .shared import Plan

# What the rows of a table must divide by to be cut. Published vocabularies do by 64; one to which tokens were added
# one by one stays whole, rather than that it forbids every size.
ROWS = 8


def decoder_layers(path: str) -> Plan:
    """The layers of Llama's kin: attention by heads (its views take the head's width), and a gated MLP."""
    return {
        f"{path}.*.self_attn.q_proj": "colwise",
        f"{path}.*.self_attn.k_proj": "colwise",
        f"{path}.*.self_attn.v_proj": "colwise",
        f"{path}.*.self_attn.o_proj": "rowwise",
        f"{path}.*.mlp.gate_proj": "colwise",
        f"{path}.*.mlp.up_proj": "colwise",
        f"{path}.*.mlp.down_proj": "rowwise",
    }


def with_vocabulary(plan: Plan, *tables: str, head: str | None = None) -> Callable[[nn.Module], Plan]:
    """`plan` and the embedding `tables`, all of one vocabulary, and the output `head` that may be tied to them.

    They are cut along the vocabulary, so that tied ones stay one tensor; whole where it does not divide.
    """

    def of(model: nn.Module) -> dict[str, Any]:
        table = model.get_submodule(tables[0])
        divides = isinstance(table, nn.Embedding) and table.weight.shape[0] % ROWS == 0
        embedding, logits = ("embedding_rowwise", "colwise_gather") if divides else ("replicate", "replicate")
        heads = {} if head is None else {head: logits}
        return {**plan, **dict.fromkeys(tables, embedding), **heads}

    return of
