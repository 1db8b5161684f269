"""Published models by name, and the table of what their plans do: `tp-layers describe NAME` and `--all`.

Everything is computed from configs, on meta, with weights in bfloat16 but for those a class keeps in float32.
"""

from typing import Any

import torch
from torch import nn

from .describe import Report, describe
from .loader.build import build, final_dtype
from .named import model_class
from .plans.families import PUBLISHED
from .plans.registry import plan_for

SIZES = (2, 4, 8)
HEADER = """# Models

What the registered plans do to published models, from their configs alone: `tp-layers describe --all` prints this
page, and `tp-layers describe NAME --size N` says more of one. Weights are in bfloat16, those that a class keeps in
float32 in float32; GB = 10^9 bytes on each rank. An asterisk marks a size that does not divide the model's heads or
blocks: it takes `uneven=True`, and the figure is that of the largest rank; where there is none (-), that does not help
either. Collectives are those of one forward call, with their bytes for each row of their input in all: a token, or, for
most modulations (all-gathered), an image.

| model | class | parameters | sharded | GB on one | {sizes} | collectives |
| --- | --- | --- | --- | --- | {rules} | --- |
"""


def published(name: str) -> nn.Module:
    """The model published as `name`, without weights, in bfloat16.

    Raises:
        ValueError: there is none in the registry, or its library is missing.
    """
    if name not in PUBLISHED:
        raise ValueError(f"no published model is called '{name}'; there are {', '.join(sorted(PUBLISHED))}")
    model = _built(*PUBLISHED[name])
    for key, parameter in model.named_parameters():
        parameter.data = parameter.data.to(final_dtype(model, key, parameter.dtype, torch.bfloat16))
    return model


def _built(found: str, config: dict[str, Any]) -> nn.Module:
    try:
        kind = model_class(found)
    except ValueError:
        kind = model_class(found, "transformers")
        with torch.device("meta"):
            return kind(kind.config_class(**config))
    return build(kind, config)


def table() -> str:
    """`docs/models.md`: a row for every published model."""
    sizes = " | ".join(f"GB at {size}" for size in SIZES)
    rows = (row(name) + "\n" for name in sorted(PUBLISHED, key=str.lower))
    return HEADER.format(sizes=sizes, rules=" | ".join("---" for _ in SIZES)) + "".join(rows)


def row(name: str) -> str:
    """The line of the table for the model published as `name`."""
    model = published(name)
    plan = plan_for(model)
    one = describe(model, plan, size=1, uneven=True)
    reports = {size: describe(model, plan, size=size, uneven=True) for size in SIZES if size in one.sizes}
    even = describe(model, plan, size=1).sizes
    marks = {size: "" if size in even else "*" for size in SIZES}
    return "| " + " | ".join([name, one.model, *_cells(model, one, reports, marks)]) + " |"


def _cells(model: nn.Module, one: Report, reports: dict[int, Report], marks: dict[int, str]) -> list[str]:
    count = sum(parameter.numel() for parameter in model.parameters())
    first = next(iter(reports.values()), one)
    return [
        f"{count / 1e9:.2f} B",
        f"{1 - first.whole_bytes / first.full_bytes:.0%}",
        f"{one.held_bytes / 1e9:.2f}",
        *(f"{reports[size].held_bytes / 1e9:.2f}{marks[size]}" if size in reports else "-" for size in SIZES),
        ", ".join(f"{it.count} {it.kind} ({it.bytes_per_row:,} B a row)" for it in first.collectives),
    ]
