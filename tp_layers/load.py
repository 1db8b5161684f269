"""`load`: a sharded model, or a pipeline of them, straight from its checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from .agree import agreed
from .group import Group, GroupLike
from .loader.components import is_pipeline
from .loader.load import load_model
from .loader.pipeline import Wanted, load_pipeline
from .rates import Rates


def load(
    model_class: type[Any],
    path: str | Path,
    *,
    plan: Mapping[str, Any] | None = None,
    group: GroupLike = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    device: torch.device | str | None = None,
    subfolder: str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    components: Sequence[str] | None = None,
    check: bool = True,
    report: bool = False,
    mmap: bool = False,
    backend: str | None = None,
    reduce_dtype: torch.dtype | None = None,
    uneven: bool = False,
    check_inputs: bool = True,
    fuse: bool | None = None,
    deterministic: bool = False,
    overlap: bool | int | Rates = False,
    adapters: Sequence[tuple[str | Path, float]] | None = None,
    **others: Any,
) -> Any:
    """Reads this rank's shards of a diffusers or transformers checkpoint and returns the sharded model, in eval mode.

    Of a pipeline's folder it reads those components so that `apply` would shard, leaves the others to diffusers, and
    returns the pipeline, all of it on this rank's device. No rank ever holds a full planned parameter.

    Args:
        model_class: a model class of diffusers, such as `Flux2Transformer2DModel`, or of transformers, such as
            `T5EncoderModel`; or a class of pipelines, such as `Flux2Pipeline`.
        path: a folder with `config.json` and safetensors weights (one file, or several with their index), or the id of
            a repository on the hub, of which only these files are downloaded. Of a pipeline, one that has a
            `model_index.json`.
        plan, group, components, backend, reduce_dtype, uneven, check_inputs, fuse, deterministic, overlap: as in
            `apply`.
        dtype: for floating-point parameters, as the library of the class casts (`_keep_in_fp32_modules` become
            float32). None: each stays as it is stored. Of a pipeline also names of components to dtypes, "default" for
            the others, as diffusers takes them.
        device: where the shards go. None: the group's device (the current accelerator; the CPU under gloo).
        subfolder: the component of a pipeline folder, such as "transformer".
        variant: of the weights, such as "fp16". There is no other in its place.
        revision: of a repository on the hub: a branch, a tag or a commit.
        check: as in `apply`. False also leaves out tensors of the checkpoint that the model does not have.
        report: True returns `(model, LoadReport)`, or `(pipeline, PipelineReport)`.
        mmap: True leaves on disk, mapped into memory, what a rank needs in one run and as it is stored (whole tensors,
            colwise shards); for CPU ranks. It must not be changed or cut short as long as the model lives.
        adapters: pairs of a path and a scale (see `load_adapter`), LoRA that each rank adds to its shards, in float32
            and rounded once. They are part of the weights then: a `save` has them, and `reload` replaces them.
        others: components of a pipeline that are there already, such as `vae=vae`.

    Raises:
        TypeError: an argument is unknown.
        ValueError: an argument, the config, the plan or the checkpoint does not fit, and nothing has been read yet; or
            another rank fails.
        FileNotFoundError: there is no such folder, or no safetensors weights in it.
        OSError: a file cannot be read, or ends early.
    """
    ranks = Group.of(group, deterministic)
    how: dict[str, Any] = dict(
        group=ranks,
        device=device,
        variant=variant,
        revision=revision,
        check=check,
        mmap=mmap,
        backend=backend,
        reduce_dtype=reduce_dtype,
        uneven=uneven,
        check_inputs=check_inputs,
        fuse=fuse,
        overlap=overlap,
    )
    agreed(ranks, lambda: _refuse_misplaced(model_class, subfolder, components, adapters))
    made: Any
    done: Any
    if is_pipeline(model_class):
        made, done = load_pipeline(model_class, path, Wanted(components, plan or {}, dtype, others), how)
    else:
        own: dict[str, Any] = dict(
            plan=plan, dtype=dtype, subfolder=subfolder, report=report, adapters=adapters, **others
        )
        made, done = load_model(model_class, path, **own, **how)
    return (made, done) if report else made


def _refuse_misplaced(
    model_class: type[Any], subfolder: str | None, components: Sequence[str] | None, adapters: Sequence[Any] | None
) -> None:
    if not is_pipeline(model_class):
        if components is not None:
            raise ValueError(f"components= is for pipelines, this is a {model_class.__name__}")
    elif subfolder is not None:
        raise ValueError(f"subfolder= is for one component: load its class, or all of {model_class.__name__}")
    elif adapters is not None:
        raise ValueError("adapters= is for one model: load it with them, and hand it over, as in transformer=model")
