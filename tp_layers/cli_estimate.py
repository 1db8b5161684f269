"""`tp-layers describe MODEL --hardware NAME|measured --tokens N`: a table of estimated steps."""

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .estimate import estimate, main_dtype, sizes_of
from .group import Group
from .hardware import HARDWARE, MEASURED, Hardware, measured, named
from .plans.resolve import resolve
from .rows import Tokens

# Options that only an estimate takes.
OPTIONS = ("tokens", "text_tokens")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `describe` for it."""
    known = f"{', '.join(HARDWARE)}, or {MEASURED}: on CPU ranks, or under torchrun on its own"
    parser.add_argument("--hardware", metavar="NAME", help=f"estimate a step at each size (or --size) on it: {known}")
    parser.add_argument("--tokens", type=int, help="for --hardware: of the image (or video, or of a text encoder)")
    parser.add_argument("--text-tokens", type=int, help="for --hardware: of the text (default: none)")


def check(options: argparse.Namespace) -> None:
    """Raises ValueError if the options cannot be of any estimate."""
    if options.hardware != MEASURED:
        named(options.hardware)
    if options.tokens is None:
        raise ValueError("--hardware needs --tokens, the rows of one step")
    if options.tokens < 1 or (options.text_tokens or 0) < 0:
        raise ValueError("--tokens must be at least 1, and --text-tokens not negative")


def run(model: nn.Module, plan: Mapping[str, Any], options: argparse.Namespace) -> int:
    """Prints the table, on one rank; returns the exit status."""
    how: dict[str, Any] = {"plan": plan, "uneven": bool(options.uneven)}
    sizes = [options.size] if options.size else sizes_of(model, **how)
    hardware: Hardware | Mapping[int, Hardware]
    if options.hardware == MEASURED:
        sizes = [size for size in sizes if options.size or size <= _ranks()]
        resolve(model, plan, sizes[-1], check=False, uneven=how["uneven"])
        hardware = _measured(sizes, main_dtype(model))
    else:
        hardware = named(options.hardware)
    if not dist.is_initialized() or Group.of(None).rank == 0:
        tokens = Tokens(options.tokens, options.text_tokens or 0)
        print(estimate(model, hardware, tokens, sizes=sizes, **how))
    return 0


def _ranks() -> int:
    """How many there are to measure: those of torchrun, or the CPU's cores."""
    return int(os.environ.get("WORLD_SIZE", 0)) or os.cpu_count() or 1


def _measured(sizes: Sequence[int], dtype: torch.dtype) -> dict[int, Hardware]:
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    return measured(sizes, dtype)
