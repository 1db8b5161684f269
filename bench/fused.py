"""Are fused blocks faster than unfused ones? `results/fused.csv`, from which `kernels.backend.FUSED` is.

A double and a single block of FLUX.1 and of FLUX.2, 256 image and 64 text tokens, whole on one rank and sharded over
two, each model fused and unfused in turn in one run. On the CPU by default, where the ranks talk over gloo, in float32;
with `--device cuda` on one GPU, unsharded, in bfloat16, at the models' own widths.

    python bench/fused.py [--rounds 40] [--device cuda] [--output bench/results/fused.csv]
"""

import argparse
import copy
from pathlib import Path
from typing import Any

import diffusers
import torch

import tp_layers
from record import RESULTS, Table
from timing import Times, interleaved
from tp_layers.group import Group
from tp_layers.launch import Ranks

IMAGE, TEXT = 256, 64
WIDTHS = {"cpu": (64, 256, 1024), "cuda": (3072, 6144)}
AXES = {
    "FluxTransformer2DModel": {"axes_dims_rope": (4, 6, 6), "pooled_projection_dim": 32},
    "Flux2Transformer2DModel": {"axes_dims_rope": (4, 4, 4, 4), "timestep_guidance_channels": 32},
}


def build(name: str, width: int) -> torch.nn.Module:
    """One double and one single block, with heads of 16."""
    common = {"num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16, "in_channels": 16}
    common |= {"num_attention_heads": width // 16, "joint_attention_dim": 32}
    return getattr(diffusers, name)(**common, **AXES[name]).eval()


def inputs(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """One image's arguments of the forward."""
    axes = len(AXES[name]["axes_dims_rope"])
    found: dict[str, Any] = {
        "hidden_states": torch.randn(1, IMAGE, 16, dtype=dtype),
        "encoder_hidden_states": torch.randn(1, TEXT, 32, dtype=dtype),
        "timestep": torch.tensor([0.5], dtype=dtype),
        "img_ids": torch.zeros(IMAGE, axes),
        "txt_ids": torch.zeros(TEXT, axes),
    }
    if axes == 3:
        return found | {"pooled_projections": torch.randn(1, 32, dtype=dtype)}
    return found | {"guidance": torch.tensor([4.0], dtype=dtype)}


def measure(group: Group, name: str, width: int, device: str, rounds: int) -> dict[str, Times]:
    """The times of one call, fused and unfused."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = build(name, width).to(device, dtype)
    models = {
        "fused": tp_layers.apply(copy.deepcopy(model), group=group, fuse=True),
        "unfused": tp_layers.apply(model, group=group, fuse=False),
    }
    arguments = {key: value.to(device) for key, value in inputs(name, dtype).items()}
    with torch.no_grad():
        variants = {key: lambda it=it: it(**arguments, return_dict=False) for key, it in models.items()}
        for variant in variants.values():
            variant()
        # As many rounds on every rank, which wait for each other.
        return interleaved(variants, device, seconds=0, least=rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--device", choices=WIDTHS, default="cpu")
    parser.add_argument("--output", type=Path, default=RESULTS / "fused.csv")
    options = parser.parse_args()
    with Table(options.output) as table, Ranks(2) as ranks:
        for name in AXES:
            for width in WIDTHS[options.device]:
                for size in (1, 2) if options.device == "cpu" else (1,):
                    arguments = (name, width, options.device, options.rounds)
                    times = ranks.run(measure, *arguments, size=size)[0] if size > 1 else measure(Group(), *arguments)
                    row = {"model": name, "width": width, "ranks": size}
                    for variant, time in times.items():
                        row |= {f"{variant}_ms": f"{1e3 * time.median:.3f}", f"{variant}_spread": f"{time.spread:.2f}"}
                    row["ratio"] = f"{times['fused'].median / times['unfused'].median:.3f}"
                    table.write(row)
                    print(" ".join(map(str, row.values())), flush=True)


if __name__ == "__main__":
    main()
