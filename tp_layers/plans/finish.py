"""The last steps of sharding, in memory as while loading: a model whose parameters hold their values is made ready."""

import logging

from torch import nn

from ..agree import agreed
from ..failure import watch_failures
from ..group import Group
from ..inputs import check_first_inputs
from ..layers.options import Options
from ..rates import Rates
from ..replicas import refuse_replicas
from .overlap import overlap_model
from .resolve import Resolved
from .shard import fuse_model, watch_gradients
from .streams import join_streams

logger = logging.getLogger(__name__)


def finish(
    model: nn.Module,
    resolved: Resolved,
    group: Group,
    options: Options,
    *,
    overlap: bool | int | Rates,
    check_inputs: bool,
) -> None:
    """Has gradients summed, sums overlapped, first inputs compared, failures told, blocks fused and streams joined.

    It warns of notes.

    Raises:
        Exception: a rank could not, such as for want of memory to fuse, on all of them.
        ValueError: the ranks join other streams, as of other versions of diffusers, on all of them.
    """

    def prepare() -> tuple[list[str], list[str]]:
        watch_gradients(model, resolved, group)
        if check_inputs:
            check_first_inputs(model, group)
        refuse_replicas(model, group)
        watch_failures(model, group)
        return fuse_model(model, options), [] if options.fuse is False else join_streams(model, group)

    overlap_model(model, overlap, group)
    notes, _ = agreed(group, prepare, lambda found: found[1])
    for note in notes:
        logger.warning("%s", note)
