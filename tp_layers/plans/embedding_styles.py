"""The style of an embedding table."""

from typing import Any

from torch import nn

from ..group import Group
from ..layers.embedding import VocabParallelEmbedding, plain_embedding
from ..layers.options import DEFAULT, Options
from .spec import ShardSpec
from .style import Specs, Style


class EmbeddingRowwise(Style):
    """`"embedding_rowwise"`: each rank holds the rows of a part of the vocabulary. The name is that of transformers."""

    input, output, collective = "whole", "whole", "all-reduce"

    def specs(self, module: nn.Module) -> Specs:
        return {"weight": ShardSpec.of(0, plain_embedding(module).weight.shape[0], granules=self.granules)}

    def payload(self, target: Any) -> int:
        return target.weight.shape[1] * target.weight.dtype.itemsize

    def shard(self, module: nn.Module, group: Group, options: Options = DEFAULT) -> nn.Module:
        return VocabParallelEmbedding(plain_embedding(module), self.specs(module)["weight"], group, options)
