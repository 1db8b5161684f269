"""A step of a sharded FLUX.2 transformer, by this package and by diffusers' own tensor parallelism: `results/step.csv`.

On two CPU (gloo) ranks of one thread each, with the same weights and inputs: a few blocks of three hidden sizes, 256
image and 64 text tokens. The modulations stay whole, as they do in every published FLUX.2 and in diffusers' plan. The
two ways run in turn, a sample of each in every round; the time of a sample is the slowest rank's, and a ratio is the
median of the rounds' own, in which what else the machine does counts on both sides. Another way, such as fused blocks,
is one more entry of WAYS.

Exits with 1 if the outputs are further apart than rounding explains, or a bound is missed.

    python bench/step.py [--hidden 64 256 1024] [--rounds 9] [--output bench/results/step.csv]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from diffusers.hooks import tensor_parallel
from diffusers.models._modeling_parallel import TensorParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import tp_layers
from record import RESULTS, Table
from tp_layers.exchange import gather_objects
from tp_layers.group import Group
from tp_layers.launch import Ranks

SIZE, IMAGE, TEXT = 2, 256, 64
CHANNELS, TEXT_WIDTH = 32, 128
# Of our time in diffusers' own, by hidden size.
MOST = {64: 0.7, 256: 0.7, 1024: 1.0}
ERROR = 1e-6
# Steps a sample, by hidden size: a small one takes less than the clock's own noise.
STEPS = {64: 10, 256: 5, 1024: 1}

# The models that a rank keeps between two calls.
_kept: dict[str, nn.Module] = {}


def full(hidden: int) -> nn.Module:
    """The unsharded model, weights by 1 / sqrt(fan in), the same on every rank."""
    # Of 128 channels, as in every published FLUX.2, but for one to each rank.
    heads = max(SIZE, hidden // 128)
    width = hidden // heads
    with torch.device("meta"):
        model = Flux2Transformer2DModel(
            in_channels=CHANNELS, num_layers=2, num_single_layers=4, num_attention_heads=heads,
            attention_head_dim=width, joint_attention_dim=TEXT_WIDTH, axes_dims_rope=(width // 4,) * 4,
        )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.detach().normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
        else:
            parameter.detach().fill_(1)
    return model.eval()


def inputs() -> dict[str, torch.Tensor]:
    """The arguments of one step."""
    generator = torch.Generator().manual_seed(1)
    image, text = torch.zeros(IMAGE, 4), torch.zeros(TEXT, 4)
    image[:, 1], image[:, 2] = torch.arange(IMAGE) // 16, torch.arange(IMAGE) % 16
    text[:, 3] = torch.arange(TEXT)
    return {
        "hidden_states": torch.randn(1, IMAGE, CHANNELS, generator=generator),
        "encoder_hidden_states": torch.randn(1, TEXT, TEXT_WIDTH, generator=generator),
        "timestep": torch.tensor([0.5]),
        "guidance": torch.tensor([4.0]),
        "img_ids": image,
        "txt_ids": text,
    }


def _ours(model: nn.Module, group: Group) -> nn.Module:
    return tp_layers.apply(model, tp_layers.plan_for(model, modulation="whole"), group=group)


def _diffusers(model: nn.Module, group: Group) -> nn.Module:
    """diffusers' own way, which refuses CPU ranks where it is asked to."""
    mesh = DeviceMesh.from_group(group.process_group, "cpu", mesh_dim_names=("tp",))  # type: ignore[arg-type]
    config = TensorParallelConfig(mesh=mesh)
    config.setup(group.rank, group.size, torch.device("cpu"), mesh)
    kept = tensor_parallel._SUPPORTED_TP_DEVICES
    tensor_parallel._SUPPORTED_TP_DEVICES = (*kept, "cpu")
    try:
        tensor_parallel.apply_tensor_parallel(model, config, type(model)._tp_plan)
    finally:
        tensor_parallel._SUPPORTED_TP_DEVICES = kept
    return model


# Each is compared with the last; the first has the bounds.
WAYS: dict[str, Callable[[nn.Module, Group], nn.Module]] = {"tp_layers": _ours, "diffusers": _diffusers}


def prepare(group: Group, hidden: int) -> dict[str, float]:
    """Shards the model by each way, and gives how far each output is from the full model's: norm over norm."""
    _kept.clear()
    wanted = _step(full(hidden))
    for way, shard in WAYS.items():
        _kept[way] = shard(full(hidden), group)
    return {way: float((_step(model) - wanted).norm() / wanted.norm()) for way, model in _kept.items()}


def timed(group: Group, way: str, steps: int) -> float:
    """Seconds of one of `steps` steps on this rank; all ranks begin together."""
    model, arguments = _kept[way], inputs()
    gather_objects(None, group)
    with torch.no_grad():
        start = time.perf_counter()
        for _ in range(steps):
            model(**arguments, return_dict=False)
        return (time.perf_counter() - start) / steps


def _step(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(), return_dict=False)[0]


def measure(ranks: Ranks, hidden: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    """One row for each way; the first round, which nobody waits for in practice, does not count."""
    errors = ranks.run(prepare, hidden)
    seen: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        # Each way goes first in every other round.
        for way in list(WAYS)[:: -1 if number % 2 else 1]:
            seconds = max(ranks.run(timed, way, steps))
            seen[way] += [seconds] if number else []
    peer = seen[list(WAYS)[-1]]
    return [
        {
            "hidden": hidden,
            "way": way,
            "milliseconds": round(1e3 * statistics.median(seen[way]), 3),
            "ratio": round(statistics.median(mine / other for mine, other in zip(seen[way], peer, strict=True)), 3),
            "most": MOST[hidden] if way == next(iter(WAYS)) else "",
            "error": f"{max(rank[way] for rank in errors):.1e}",
        }
        for way in WAYS
    ]


def missed(row: dict[str, Any]) -> bool:
    """Whether a row is over its bound, or wrong."""
    return float(row["error"]) > ERROR or (row["most"] != "" and row["ratio"] > row["most"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, nargs="+", choices=list(MOST), default=list(MOST))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path, default=RESULTS / "step.csv")
    options = parser.parse_args()
    rows = []
    with Table(options.output) as table, Ranks(SIZE, timeout=300) as ranks:
        for hidden in options.hidden:
            for row in measure(ranks, hidden, options.rounds, STEPS[hidden]):
                rows.append(row)
                table.write(row)
                most = f", at most {row['most']:g}" if row["most"] != "" else ""
                print(
                    f"hidden {hidden:4}  {row['way']:10} {row['milliseconds']:9.2f} ms  {row['ratio']:5.2f}{most}  "
                    f"error {row['error']}{'  MISSED' if missed(row) else ''}",
                    flush=True,
                )
    sys.exit(any(missed(row) for row in rows))


if __name__ == "__main__":
    main()
