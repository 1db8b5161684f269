"""diffusers' own calls for tensor parallelism, carried out by this package from `enable()` on, until `disable()`.

    Model.from_pretrained(..., parallel_config=TensorParallelConfig(tp_degree=n))
    model.enable_parallelism(config=TensorParallelConfig(tp_degree=n))

become `load` and `apply` with the registered plan of the model's class, else its own `_tp_plan`: on CPU (gloo) ranks
too, and for every class that has a plan here. What diffusers refuses stays refused. Context parallelism, and every
other call, goes to diffusers as before.

Nothing is changed at import, and diffusers itself is imported by `enable()` alone.
"""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .agree import agreed
from .apply import apply
from .group import Group
from .loader.folder import find_folder
from .loader.hub import OPTIONS
from .loader.load import load_model

# On others diffusers shards by code of their own.
DEVICES = ("cpu", "cuda", "xpu")

# Arguments of from_pretrained that a sharded load cannot honour, with the reason; diffusers refuses others itself.
REFUSED = {
    "ignore_mismatched_sizes": "a parameter of another size would stay without values",
    "proxies": "the hub's client takes them from the environment (HTTPS_PROXY)",
    "max_memory": "it goes with device_map",
    "offload_folder": "it goes with device_map",
    "offload_state_dict": "it goes with device_map",
    "flashpack_kwargs": "FlashPack files cannot be read in slices",
}
# Of these diffusers' own check decides.
CHECKED = ("device_map", "low_cpu_mem_usage", "use_flashpack", "use_safetensors", "quantization_config")

# The attributes of ModelMixin that are replaced, as they were: empty while nothing is.
_originals: dict[str, Any] = {}


def enable() -> AbstractContextManager[Any]:
    """From now on diffusers' tensor-parallel calls use this package. A second call changes nothing.

    Returns:
        A context manager, for `with enable():`, which at its end disables what this call has enabled.

    Raises:
        ImportError: diffusers is not there.
    """
    from diffusers.hooks import tensor_parallel  # noqa: F401
    from diffusers.models.modeling_utils import ModelMixin

    scope = ExitStack()
    if not _originals:
        for name, replacement in (("from_pretrained", _from_pretrained), ("enable_parallelism", _enable_parallelism)):
            _originals[name] = vars(ModelMixin)[name]
            setattr(ModelMixin, name, replacement(_originals[name]))
        scope.callback(disable)
    return scope


def disable() -> None:
    """diffusers' tensor-parallel calls are its own again; models that are sharded stay so."""
    if _originals:
        from diffusers.models.modeling_utils import ModelMixin

        for name, original in _originals.items():
            setattr(ModelMixin, name, original)
        _originals.clear()


def _from_pretrained(original: Any) -> Any:
    """The classmethod that stands for `original`."""

    @functools.wraps(original.__func__)
    def from_pretrained(cls: type[nn.Module], pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        if _tensor_parallel(kwargs.get("parallel_config")) is None:
            return original.__get__(None, cls)(pretrained_model_name_or_path, **kwargs)
        return _load(cls, pretrained_model_name_or_path, **kwargs)

    return classmethod(from_pretrained)


def _enable_parallelism(original: Callable[..., Any]) -> Any:
    """The method that stands for `original`."""

    @functools.wraps(original)
    def enable_parallelism(self: Any, *, config: Any, cp_plan: Any = None) -> None:
        tensor_parallel = _tensor_parallel(config)
        # diffusers' own call refuses a model that has a config already.
        if tensor_parallel is None or self._parallel_config is not None:
            return original(self, config=config, cp_plan=cp_plan)
        mesh = _mesh(tensor_parallel)
        group = Group.of(mesh)

        def check() -> None:
            if cp_plan is not None:
                raise ValueError("`cp_plan` is for context parallelism, this config is for tensor parallelism: drop it")
            _check(type(self), config, mesh, getattr(self.config, "num_attention_heads", None), model=self)

        agreed(group, check)
        apply(self, group=group)
        _record(self, config, mesh, group)

    return enable_parallelism


def _load(
    cls: type[nn.Module],
    path: Any,
    *,
    parallel_config: Any,
    dtype: torch.dtype | None = None,
    torch_dtype: torch.dtype | None = None,
    subfolder: str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    output_loading_info: bool = False,
    disable_mmap: bool = False,  # Weights are read, not mapped, either way.
    **others: Any,
) -> Any:
    mesh = _mesh(_tensor_parallel(parallel_config))
    group = Group.of(mesh)

    def find() -> Path:
        hub = {name: others[name] for name in OPTIONS if others.get(name) is not None}
        _refuse({name: value for name, value in others.items() if name not in (*OPTIONS, *CHECKED)})
        checked = {name: others[name] for name in CHECKED if name in others}
        # The hub's None is the default; diffusers takes it for a refusal of safetensors.
        if checked.get("use_safetensors", True) is None:
            del checked["use_safetensors"]
        checked["hf_quantizer"] = checked.pop("quantization_config", None)
        _check(cls, parallel_config, mesh, None, **checked)
        # Before any weights are fetched.
        config = cls.load_config(path, subfolder=subfolder, revision=revision, **hub)  # type: ignore[attr-defined]
        _check(cls, parallel_config, mesh, config.get("num_attention_heads"))
        return find_folder(path, subfolder, variant, revision, hub)

    folder = agreed(group, find)
    # Without one, diffusers' models are float32 whatever is stored.
    dtype = next((given for given in (dtype, torch_dtype) if given is not None), torch.float32)
    model: Any
    model, _ = load_model(cls, folder, group=group, dtype=dtype, variant=variant, report=False)
    # The folder may be one in the hub's cache.
    model.register_to_config(_name_or_path=str(path))
    _record(model, parallel_config, mesh, group)
    # Whatever is missing, unexpected or of another shape has raised.
    info: dict[str, list[str]] = {"missing_keys": [], "unexpected_keys": [], "mismatched_keys": [], "error_msgs": []}
    return (model, info) if output_loading_info else model


def _refuse(arguments: Mapping[str, Any]) -> None:
    for name, value in arguments.items():
        if name in REFUSED and value:
            reason = REFUSED[name]
        elif name not in REFUSED:
            reason = "an entry of the config is read from config.json alone, change it there"
        else:
            continue
        raise ValueError(f"`{name}` cannot be combined with a tensor-parallel `parallel_config`: {reason}")


def _tensor_parallel(config: Any) -> Any:
    """The `TensorParallelConfig` that `config` is or holds, or None."""
    from diffusers.models._modeling_parallel import TensorParallelConfig

    return config if isinstance(config, TensorParallelConfig) else getattr(config, "tensor_parallel_config", None)


def _mesh(config: Any) -> DeviceMesh:
    """The mesh of the config, or that of all ranks; making this one sets a CUDA device that is not set yet."""
    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError("torch.distributed must be available and initialized before applying a `parallel_config`.")
    if config.mesh is not None:
        return config.mesh
    accelerator = None if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator(check_available=True)
    kind = "cpu" if accelerator is None else accelerator.type
    return init_device_mesh(kind, (Group.of(None).size,), mesh_dim_names=("tp",))


def _check(cls: type[nn.Module], config: Any, mesh: DeviceMesh, heads: Any, **state: Any) -> None:
    """Raises ValueError for what diffusers refuses, and for a degree that is not the size of the mesh."""
    from diffusers.hooks.tensor_parallel import _check_tp_supported

    wanted = _tensor_parallel(config)
    if getattr(config, "context_parallel_config", None) is not None:
        raise ValueError("Combining context parallelism and tensor parallelism in a single config is not supported.")
    if mesh.device_type not in DEVICES:
        raise ValueError(
            f"tp_layers shards over devices of type {', '.join(DEVICES)}, not '{mesh.device_type}': "
            f"tp_layers.diffusers.disable() gives diffusers' own code back"
        )
    degree, world = wanted.tp_degree, Group.of(None).size
    if wanted.mesh is None and degree > world:
        raise ValueError(f"Tensor parallel degree ({degree}) cannot exceed the world size ({world}).")
    if wanted.mesh is None and degree < world:
        raise ValueError(
            f"`tp_degree` ({degree}) is less than the world size ({world}), which leaves ranks without a shard: pass "
            f"`mesh=`, this rank's axis of a mesh, such as init_device_mesh(device, (..., {degree}))[name]"
        )
    # A class without a `_tp_plan` may have a plan here, and its heads be something else.
    plan = getattr(cls, "_tp_plan", None)
    heads = None if plan is None or not isinstance(heads, int) else heads
    _check_tp_supported(cls.__name__, plan or {}, heads, wanted, **state)


def _record(model: Any, config: Any, mesh: DeviceMesh, group: Group) -> None:
    """Leaves the config on the model as diffusers does, for its own guards and whoever asks for the mesh."""
    from diffusers.models._modeling_parallel import ParallelConfig, TensorParallelConfig

    whole = ParallelConfig(tensor_parallel_config=config) if isinstance(config, TensorParallelConfig) else config
    everyone = Group.of(None)
    whole.setup(everyone.rank, everyone.size, group.device, mesh=mesh)
    model._parallel_config = whole
