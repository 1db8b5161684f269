"""The `tp-layers` command (`python -m tp_layers`): plans and checkpoints looked at without a GPU or a script.

Exit status: 0 done, 1 `verify` found a difference, 2 the arguments, the plan or the checkpoint do not fit.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from . import cli_estimate, windows
from .describe import describe
from .group import Group
from .kernels import backend, configs
from .launch import RankError, Ranks
from .load import load
from .loader.build import build
from .loader.folder import find_folder
from .loader.load import describe_checkpoint
from .loader.report import LoadReport
from .loader.save import check_limit, save
from .named import class_of, imported, model_class
from .overview import published, table
from .plans.families import PUBLISHED
from .plans.registry import plan_for
from .verify import verify

DESCRIBE = "What a plan does at a size, without reading weights; or which kernels run."
# Of one trial; a process that dies is noticed at once, by its pipe. The default would end a long save half-way.
LIMIT_SECONDS = 24 * 3600.0
# Options of `describe`, by what they are about.
PLACE = ("subfolder", "variant", "revision")
OF_MODELS = ("what", "size", *PLACE, "dtype", "plan", "uneven", "hardware", *cli_estimate.OPTIONS)
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
        made.add_argument("--variant", help="of the weights, such as fp16")
        made.add_argument("--revision", help="of a repository: a branch, a tag or a commit")
        made.add_argument("--dtype", choices=DTYPES, help="load floating-point weights in it (default: as stored)")

    def with_plan(made: argparse.ArgumentParser) -> None:
        made.add_argument("--plan", metavar="FILE.py:NAME", help="a plan of your own, instead of the registered one")
        # None, as for all options that were not given.
        made.add_argument("--uneven", action="store_true", default=None, help="ranks may hold unequal parts")

    made = commands.add_parser("describe", help=DESCRIBE, description=DESCRIBE)
    made.add_argument("what", metavar="FOLDER|CLASS|NAME", nargs="?", help="NAME: of a published model, as in --all")
    made.add_argument("--size", type=int, help="number of ranks")
    checkpoint(made)
    with_plan(made)
    cli_estimate.add_options(made)
    made.add_argument("--all", action="store_true", help="instead: a table of the published models the registry knows")
    made.add_argument(
        "--kernels",
        action="store_true",
        help="instead: which backend 'auto' takes for each operation, and which all-reduce",
    )
    made.add_argument("--architecture", choices=configs.ARCHITECTURES, help="for --kernels (default: this GPU's)")
    made.set_defaults(run=_describe)
    made = command("verify", _verify, "Compares a sharded model with one rank, layer by layer.", "FILE.py:FUNCTION")
    with_plan(made)
    made = command("load", _load, "Loads a checkpoint on CPU ranks as a trial.", "FOLDER")
    checkpoint(made)
    with_plan(made)
    made = command("save", _save, "Loads a checkpoint on CPU ranks and writes it again, whole or sharded.", "FOLDER")
    checkpoint(made)
    with_plan(made)
    made.add_argument("to", metavar="NEW_FOLDER")
    made.add_argument("--max-shard-size", help="of one file (default: 5GB)")
    made.add_argument("--sharded", action="store_true", help="a file of shards for each rank, which load reads faster")
    return parser


def _describe(options: argparse.Namespace) -> int:
    if options.kernels:
        _refuse(options, OF_MODELS, "describe --kernels is not about a model")
        return _kernels(options.architecture or _current_architecture())
    _refuse(options, ("architecture",), "without --kernels no GPU is asked for")
    if options.all:
        _refuse(options, OF_MODELS, "describe --all is about all models")
        print(table(), end="")
        return 0
    if options.what is None or (options.size is None and options.hardware is None):
        raise ValueError(
            "describe needs FOLDER|CLASS|NAME and --size, or --all, or --kernels; with --hardware no --size"
        )
    if options.hardware is None:
        _refuse(options, cli_estimate.OPTIONS, "without --hardware no step is estimated")
    else:
        cli_estimate.check(options)
    if "/" not in options.what and not Path(options.what).exists():
        _refuse(options, PLACE, f"{options.what} is no folder")
        dtype = DTYPES.get(options.dtype)
        model = published(options.what) if options.what in PUBLISHED else build(model_class(options.what), {})
        model = model if dtype is None else nn.Module.to(model, dtype)
    else:
        model = _described(options)
    plan = _plan(options) or plan_for(model)
    if options.hardware is not None:
        return cli_estimate.run(model, plan, options)
    print(describe(model, plan, size=options.size, check=False, uneven=bool(options.uneven)))
    return 0


def _refuse(options: argparse.Namespace, names: Sequence[str], reason: str) -> None:
    """Raises ValueError if one of the options `names` was given: it would be ignored."""
    given = [name for name in names if getattr(options, name) is not None]
    if given:
        shown = ", ".join(repr(options.what) if name == "what" else f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"{reason}: leave out {shown}")


def _plan(options: argparse.Namespace) -> Any:
    return imported(options.plan) if options.plan else None


def _described(options: argparse.Namespace) -> nn.Module:
    """The model of a checkpoint, without its weights."""
    folder = find_folder(options.what, options.subfolder, options.variant, options.revision)
    model, _ = describe_checkpoint(class_of(folder), folder, DTYPES.get(options.dtype), options.variant)
    return model


def _kernels(architecture: str) -> int:
    print(f"backend='auto' on {architecture}")
    for row in [backend.Choice("operation", "shape", "dtype", "backend", "reason"), *backend.choices(architecture)]:
        print(f"{row.operation:16}{row.shape:7}{row.dtype:9}{row.backend:9}{row.reason}")
    for (machine, size, dtype), found in windows.WINDOWS.items():
        for first, last, way in found:
            print(f"all-reduce of {first} to {last} bytes, {machine}, {size} ranks, {dtype}: {way}")
    return 0


def _current_architecture() -> str:
    """Of the current GPU; sm_90 where there is none."""
    return configs.architecture_of(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"


def _verify(options: argparse.Namespace) -> int:
    function = imported(options.what)
    if not callable(function):
        raise ValueError(f"{options.what} is not callable: it must return (model, inputs)")
    made = function()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ValueError(f"{options.what} must return (model, inputs), it returned {type(made).__name__}")
    model, inputs = made
    verdict = verify(model, inputs, _plan(options), size=options.size, uneven=bool(options.uneven))
    print(verdict)
    return 0 if verdict.ok else 1


def _load(options: argparse.Namespace) -> int:
    plan = _checked(options)
    with Ranks(options.size, timeout=LIMIT_SECONDS) as ranks:
        reports = ranks.run(_trial, options.what, *_how(options, plan))
    columns = {
        "held MB": lambda it: it.bytes_held / 1e6,
        "needed MB": lambda it: it.bytes_needed / 1e6,
        "read MB": lambda it: it.bytes_read / 1e6,
        "peak MB": lambda it: it.peak_host_bytes / 1e6,
        "seconds": lambda it: it.seconds,
        "preparing": lambda it: it.seconds_preparing,
        "reading": lambda it: it.seconds_reading,
        "GB/s": lambda it: it.gigabytes_per_second,
    }
    print("rank", *(f"{name:>12}" for name in columns))
    for report in reports:
        print(f"{report.rank:4d}", *(f"{figure(report):12,.2f}" for figure in columns.values()))
    return 0


def _save(options: argparse.Namespace) -> int:
    check_limit(options.max_shard_size, sharded=options.sharded)
    plan = _checked(options)
    with Ranks(options.size, timeout=LIMIT_SECONDS) as ranks:
        ranks.run(_trial, options.what, *_how(options, plan), options.to, options.max_shard_size, options.sharded)
    print(f"wrote {options.to}")
    return 0


def _how(options: argparse.Namespace, plan: Any) -> tuple[Any, dict[str, Any]]:
    how = {name: getattr(options, name) for name in PLACE}
    return plan, how | {"dtype": DTYPES.get(options.dtype), "uneven": bool(options.uneven)}


def _trial(
    group: Group,
    path: str,
    plan: Any,
    how: dict[str, Any],
    to: str | None = None,
    limit: str | None = None,
    sharded: bool = False,
) -> LoadReport:
    """What one rank of `load` and `save` does."""
    folder = find_folder(path, how["subfolder"], how["variant"], how["revision"])
    model, report = load(class_of(folder), path, plan=plan, group=group, report=True, **how)
    if to is not None:
        save(model, to, max_shard_size=limit, sharded=sharded)
    return report


def _checked(options: argparse.Namespace) -> Any:
    """Raises what `load` would, before any process is started; returns the plan that was asked for."""
    plan = _plan(options)
    describe(_described(options), plan, size=options.size, uneven=bool(options.uneven))
    return plan
