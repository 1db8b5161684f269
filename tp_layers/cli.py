"""The `tp-layers` command (`python -m tp_layers`): plans and checkpoints looked at without a GPU or a script.

Exit status: 0 done, 1 `verify` found a difference, 2 the arguments, the plan or the checkpoint do not fit.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .describe import describe
from .group import Group
from .kernels import backend, configs
from .launch import RankError, Ranks
from .loader.build import build
from .loader.folder import find_folder, read_config
from .loader.load import describe_checkpoint, load
from .loader.report import LoadReport
from .loader.save import parse_size, save
from .plans.registry import plan_for
from .verify import verify

DESCRIBE = "What a plan does at a size, without reading weights; or which kernels run."
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        return options.run(options)
    except (ValueError, OSError, RankError) as error:
        print(f"tp-layers: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tp-layers", description=__doc__.split("\n\n")[0])
    commands = parser.add_subparsers(required=True, metavar="describe | verify | load | save")

    def command(name: str, run: Any, text: str, what: str) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=text, description=text)
        made.add_argument("what", metavar=what)
        made.add_argument("--size", type=int, required=name != "save", default=1, help="number of ranks")
        made.set_defaults(run=run)
        return made

    def checkpoint(made: argparse.ArgumentParser) -> None:
        made.add_argument("--subfolder", help="the component of a pipeline folder, such as transformer")
        made.add_argument("--dtype", choices=DTYPES, help="load floating-point weights in it (default: as stored)")

    def with_plan(made: argparse.ArgumentParser) -> None:
        made.add_argument("--plan", metavar="FILE.py:NAME", help="a plan of your own, instead of the registered one")

    made = commands.add_parser("describe", help=DESCRIBE, description=DESCRIBE)
    made.add_argument("what", metavar="FOLDER|CLASS", nargs="?")
    made.add_argument("--size", type=int, help="number of ranks")
    checkpoint(made)
    with_plan(made)
    made.add_argument("--kernels", action="store_true", help="instead: which backend 'auto' takes for each operation")
    made.add_argument("--architecture", choices=configs.ARCHITECTURES, help="for --kernels (default: this GPU's)")
    made.set_defaults(run=_describe)
    made = command("verify", _verify, "Compares a sharded model with one rank, layer by layer.", "FILE.py:FUNCTION")
    with_plan(made)
    made = command("load", _load, "Loads a checkpoint on CPU ranks as a trial.", "FOLDER")
    checkpoint(made)
    made = command("save", _save, "Loads a checkpoint on CPU ranks and writes it again, whole.", "FOLDER")
    checkpoint(made)
    made.add_argument("to", metavar="NEW_FOLDER")
    made.add_argument("--max-shard-size", default="5GB", help="of one file (default: 5GB)")
    return parser


def _describe(options: argparse.Namespace) -> int:
    if options.kernels:
        return _kernels(options.architecture or _current_architecture())
    if options.what is None or options.size is None:
        raise ValueError("describe needs FOLDER|CLASS and --size, or --kernels")
    dtype = DTYPES.get(options.dtype)
    if "/" not in options.what and not Path(options.what).exists():
        model = build(_model_class(options.what), {})
        model = model if dtype is None else nn.Module.to(model, dtype)
    else:
        folder = find_folder(options.what, options.subfolder)
        model, _ = describe_checkpoint(_class_of(folder), folder, dtype)
    plan = _imported(options.plan) if options.plan else plan_for(model)
    print(describe(model, plan, size=options.size, check=False))
    return 0


def _kernels(architecture: str) -> int:
    print(f"backend='auto' on {architecture}")
    for row in [backend.Choice("operation", "shape", "dtype", "backend", "reason"), *backend.choices(architecture)]:
        print(f"{row.operation:16}{row.shape:7}{row.dtype:9}{row.backend:9}{row.reason}")
    return 0


def _current_architecture() -> str:
    """Of the current GPU; sm_90 where there is none."""
    return configs.architecture_of(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"


def _verify(options: argparse.Namespace) -> int:
    function = _imported(options.what)
    if not callable(function):
        raise ValueError(f"{options.what} is not callable: it must return (model, inputs)")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{options.what} must return (model, inputs), it returned {type(made).__name__}")
    model, inputs = made
    verdict = verify(model, inputs, _imported(options.plan) if options.plan else None, size=options.size)
    print(verdict)
    return 0 if verdict.ok else 1


def _load(options: argparse.Namespace) -> int:
    _checked(options)
    with Ranks(options.size) as ranks:
        reports = ranks.run(_trial, options.what, options.subfolder, DTYPES.get(options.dtype))
    print("rank       held bytes       read bytes    seconds")
    for report in reports:
        print(f"{report.rank:4d} {report.bytes_held:16,d} {report.bytes_read:16,d} {report.seconds:10.2f}")
    return 0


def _save(options: argparse.Namespace) -> int:
    _checked(options)
    limit = parse_size(options.max_shard_size)
    with Ranks(options.size) as ranks:
        ranks.run(_trial, options.what, options.subfolder, DTYPES.get(options.dtype), options.to, limit)
    print(f"wrote {options.to}")
    return 0


def _trial(
    group: Group, path: str, subfolder: str | None, dtype: torch.dtype | None, to: str | None = None, limit: int = 1
) -> LoadReport:
    """What one rank of `load` and `save` does."""
    model_class = _class_of(find_folder(path, subfolder))
    model, report = load(model_class, path, group=group, dtype=dtype, subfolder=subfolder, report=True)
    if to is not None:
        save(model, to, max_shard_size=limit)
    return report


def _checked(options: argparse.Namespace) -> None:
    """Raises what `load` would, before any process is started."""
    folder = find_folder(options.what, options.subfolder)
    model, _ = describe_checkpoint(_class_of(folder), folder)
    describe(model, size=options.size)


def _class_of(folder: Path) -> type[Any]:
    name = read_config(folder).get("_class_name")
    if not isinstance(name, str):
        raise ValueError(f"{folder / 'config.json'} names no _class_name: not a diffusers model")
    return _model_class(name)


def _model_class(name: str) -> type[Any]:
    try:
        import diffusers
    except ImportError as error:
        raise ValueError("this command needs diffusers: pip install 'tp_layers[diffusers]'") from error
    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ValueError(f"'{name}' is neither a folder nor a model class of diffusers {diffusers.__version__}")
    return found


def _imported(reference: str) -> Any:
    """The object called NAME in a Python file or module, from "FILE.py:NAME" or "package.module:NAME"."""
    place, _, name = reference.rpartition(":")
    if not place or not name:
        raise ValueError(f"expected FILE.py:NAME, got '{reference}'")
    if place.endswith(".py"):
        file = Path(place).resolve()
        if not file.is_file():
            raise FileNotFoundError(f"there is no file {place}")
        # By its folder on the path, so that the ranks' processes can import what they are sent; at its end, or a file
        # called as a module of Python's own would take that module's place.
        sys.path.append(str(file.parent))
        place = file.stem
    try:
        module = importlib.import_module(place)
        found = getattr(module, "__file__", None)
        if reference.rpartition(":")[0].endswith(".py") and found and Path(found).resolve() != file:
            raise ValueError(f"another module called '{place}' is {found}: rename {file.name}")
        return getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"cannot import '{reference}': {error}") from error
