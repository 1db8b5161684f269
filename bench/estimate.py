"""How long a step takes by `tp-layers describe --hardware measured`, and how long it takes: `results/estimate.csv`.

On 1, 2 and 4 CPU (gloo) ranks of one thread each, a few blocks of FLUX.2 (two hidden sizes) and of Wan in float32. In
every round the rates of the ranks are measured, a step is estimated from them, and a step is timed: what else the
machine does counts on both sides. A ratio, estimated over measured, is the median of the rounds' own; `low` and `high`
are the least and the most. Ranks that share a core, and what an estimate leaves out, are in them.

    python bench/estimate.py [--cases flux2-512 ..] [--rounds 7] [--output bench/results/estimate.csv]
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from torch import nn

import step
import tp_layers
from record import RESULTS, Table
from tp_layers.estimate import Step, estimate
from tp_layers.exchange import gather_objects
from tp_layers.group import Group
from tp_layers.hardware import measured_on
from tp_layers.launch import Ranks
from tp_layers.rows import Tokens

SIZES = (1, 2, 4)
FRAMES, SIDE, TEXT = 1, 32, 64


def wan() -> nn.Module:
    """A Wan of four blocks, weights by 1 / sqrt(fan in)."""
    config = {"num_attention_heads": 4, "attention_head_dim": 128, "num_layers": 4, "ffn_dim": 2048, "text_dim": 128}
    with torch.device("meta"):
        model = WanTransformer3DModel(**config)
    # Its rotary tables are not stored: made again where they can be read.
    rope = type(model.rope)(128, model.config.patch_size, model.config.rope_max_seq_len)
    model.to_empty(device="cpu").rope = rope
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.detach().normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
    return model.eval()


def wan_inputs() -> dict[str, torch.Tensor]:
    """A frame of 32 x 32 latents, in patches of 2 x 2, and text."""
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, FRAMES, SIDE, SIDE, generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT, 128, generator=generator),
        "timestep": torch.tensor([500]),
    }


FLUX = Tokens(step.IMAGE, step.TEXT)
# The model, its inputs, and how many tokens they are.
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]], Tokens]] = {
    "flux2-512": (lambda: step.full(512), step.inputs, FLUX),
    "flux2-1024": (lambda: step.full(1024), step.inputs, FLUX),
    "wan-512": (wan, wan_inputs, Tokens(FRAMES * (SIDE // 2) ** 2, TEXT)),
}

# The sharded model that a rank keeps between two calls.
_kept: list[nn.Module] = []


def prepare(group: Group, case: str) -> None:
    """Shards the model of the case, in the place of the one before, and runs it once."""
    _kept[:] = [tp_layers.apply(CASES[case][0](), group=group)]
    timed(group, case)


def timed(group: Group, case: str) -> float:
    """Seconds of a step on this rank; all ranks begin together."""
    inputs = CASES[case][1]()
    gather_objects(None, group)
    with torch.no_grad():
        start = time.perf_counter()
        _kept[0](**inputs, return_dict=False)
        return time.perf_counter() - start


def measure(ranks: Ranks, case: str, size: int, rounds: int) -> dict[str, Any]:
    """One row: medians over rounds."""
    make, _, tokens = CASES[case]
    model, seen = make(), list[tuple[Step, float]]()
    ranks.run(prepare, case, size=size)
    for _ in range(rounds):
        hardware = ranks.run(measured_on, torch.float32, size=size)[0]
        found = estimate(model, hardware, tokens, sizes=[size]).steps[0]
        seen.append((found, max(ranks.run(timed, case, size=size))))
    return row(case, size, seen)


def row(case: str, size: int, seen: list[tuple[Step, float]]) -> dict[str, Any]:
    """What the rounds, an estimate and the seconds measured in each, come to."""
    ratios = [found.seconds / seconds for found, seconds in seen]
    parts = {name: [getattr(found, name) for found, _ in seen] for name in ("gemms", "attention", "collectives")}
    return {
        "case": case,
        "size": size,
        "cores": os.cpu_count(),
        "step_ms": round(1e3 * statistics.median(seconds for _, seconds in seen), 2),
        "estimate_ms": round(1e3 * statistics.median(found.seconds for found, _ in seen), 2),
        **{f"{name}_ms": round(1e3 * statistics.median(values), 2) for name, values in parts.items()},
        "ratio": round(statistics.median(ratios), 3),
        "low": round(min(ratios), 3),
        "high": round(max(ratios), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS / "estimate.csv")
    options = parser.parse_args()
    with Table(options.output) as table, Ranks(max(options.sizes), timeout=600) as ranks:
        for case in options.cases:
            for size in options.sizes:
                found = measure(ranks, case, size, options.rounds)
                table.write(found)
                print(
                    f"{case:11} {size} ranks: {found['step_ms']:9.2f} ms, estimated {found['estimate_ms']:9.2f}, "
                    f"ratio {found['ratio']:5.2f} ({found['low']:.2f} to {found['high']:.2f})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
