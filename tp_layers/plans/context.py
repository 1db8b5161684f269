"""Context parallelism, by which diffusers splits the tokens, beside tensor parallelism: each on its own axis of a mesh.

The ranks of one tensor-parallel group must see the same tokens, so the two may have no other rank in common.
"""

import copy
from typing import Any

from torch import nn

from ..group import Group

ADVICE = (
    "make one mesh of both, such as init_device_mesh('cuda', (1, 2, 2), mesh_dim_names=('ring', 'ulysses', 'tp')), and "
    "pass it to ContextParallelConfig and group=mesh['tp'] to this package"
)


def refuse_context(model: nn.Module, group: Group) -> None:
    """Raises if diffusers splits the tokens of `model` over ranks of `group`.

    Raises:
        ValueError: it does; with what to do instead.
    """
    context = getattr(getattr(model, "_parallel_config", None), "context_parallel_config", None)
    mesh = getattr(context, "_flattened_mesh", None)
    if mesh is not None:
        _refuse_shared(model, group, mesh)


def _refuse_shared(model: nn.Module, group: Group, mesh: Any) -> None:
    if group.shares(mesh.mesh.flatten().tolist()):
        raise ValueError(
            f"cannot shard this {type(model).__name__} over ranks between which context parallelism splits the tokens: "
            f"the partial sums of different tokens would be added; {ADVICE}"
        )


class ContextParallelism:
    """`enable_parallelism` of a sharded model, for context parallelism on another axis; it can be copied with it."""

    def __init__(self, model: nn.Module, group: Group) -> None:
        self.model, self.group = model, group

    def __call__(self, *, config: Any, **kwargs: Any) -> None:
        """As diffusers' own.

        Raises:
            ValueError: the config's mesh has ranks of the tensor-parallel group, or it has none.
            RuntimeError: diffusers' own, for tensor parallelism, and for context parallelism that there is already.
        """
        model: Any = self.model
        kind: Any = type(model)
        context: Any = config if hasattr(config, "ulysses_degree") else getattr(config, "context_parallel_config", None)
        before = model.__dict__["_parallel_config"]
        if context is None or before.context_parallel_config is not None:
            return kind.enable_parallelism(model, config=config, **kwargs)
        if context.mesh is None:
            raise ValueError(f"this {kind.__name__} is sharded, so context parallelism needs a mesh: {ADVICE}")
        _refuse_shared(model, self.group, context.mesh["ring", "ulysses"])
        model.__dict__["_parallel_config"] = None
        try:
            kind.enable_parallelism(model, config=config, **kwargs)
        except BaseException:
            model.__dict__["_parallel_config"] = before
            raise
        return mark(model)


def mark(model: nn.Module) -> None:
    """Tells diffusers' guards that `model` is tensor parallel: its pipelines ask before they offload a component."""
    if not hasattr(model, "_parallel_config"):
        return
    from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig

    # Diffusers makes no config of both by itself, but reads each for its own purpose.
    config: Any = copy.copy(model._parallel_config) or ParallelConfig()
    config.tensor_parallel_config = TensorParallelConfig()
    model.__dict__["_parallel_config"] = config


def allow_context(model: nn.Module, group: Group) -> None:
    """Lets context parallelism be enabled on a model that is sharded, such as a loaded one."""
    mark(model)
    if hasattr(model, "enable_parallelism"):
        model.__dict__["enable_parallelism"] = ContextParallelism(model, group)
