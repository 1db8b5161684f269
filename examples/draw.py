"""Draws the digits 0 to 9 with the FLUX transformer in `examples/digits`; one rank of `examples/digits.py`, or alone.

    torchrun --nproc-per-node 2 examples/draw.py RESULTS
    python examples/draw.py RESULTS

Each rank writes `RESULTS/rank-N.pt`: the digits by the package's plan and by a wrong one.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel

import tp_layers

FOLDER = Path(__file__).with_name("digits")
# Pixels of a digit's side, and of a patch's: an image is 16 tokens of 4 channels.
SIDE, PATCH = 8, 2
CLASSES = 10
STEPS, GUIDANCE = 24, 2.0


def patches(images: torch.Tensor) -> torch.Tensor:
    """`[B, 8, 8]` -> `[B, 16, 4]`, rows of patches one after the other."""
    rows = images.unflatten(1, (-1, PATCH)).unflatten(3, (-1, PATCH))
    return rows.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def images(tokens: torch.Tensor) -> torch.Tensor:
    """The inverse of `patches`."""
    rows = tokens.unflatten(1, (SIDE // PATCH, -1)).unflatten(3, (PATCH, PATCH))
    return rows.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def conditions(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    """The model's inputs beside latents and time for `labels [B]`; label 10 is no digit in particular."""
    one_hot = torch.nn.functional.one_hot(labels, CLASSES + 1).float()
    side = torch.arange(SIDE // PATCH)
    rows, columns = torch.meshgrid(side, side, indexing="ij")
    return {
        "encoder_hidden_states": one_hot[:, None],
        "pooled_projections": one_hot,
        "img_ids": torch.stack([torch.zeros_like(rows), rows, columns], -1).flatten(0, 1).float(),
        "txt_ids": torch.zeros(1, 3),
    }


@torch.no_grad()
def draw(model: FluxTransformer2DModel, seed: int = 7) -> torch.Tensor:
    """The digits 0 to 9, `[10, 8, 8]` from 0 (paper) to 1 (ink), by classifier-free guidance."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randn(CLASSES, (SIDE // PATCH) ** 2, PATCH**2, generator=generator)
    inputs = conditions(torch.cat([torch.arange(CLASSES), torch.full((CLASSES,), CLASSES)]))
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    for timestep in scheduler.timesteps:
        time = (timestep / 1000).expand(2 * CLASSES)
        (velocity,) = model(torch.cat([tokens, tokens]), timestep=time, **inputs, return_dict=False)
        digit, none = velocity.chunk(2)
        (tokens,) = scheduler.step(none + GUIDANCE * (digit - none), timestep, tokens, return_dict=False)
    return ((images(tokens) + 1) / 2).clamp(0, 1)


def wrong_plan(model: FluxTransformer2DModel) -> dict[str, object]:
    """The package's plan, but that it takes the MLP of the single blocks for a gated one.

    Each rank makes a part of both halves of its width, and the output projection reads them as one part of the whole.
    Every shape fits.
    """
    halves = tp_layers.PackedColwiseParallel([1, 1])
    return {**tp_layers.plan_for(model), "single_transformer_blocks.*.proj_mlp": halves}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("results", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    how = {"dtype": torch.float32, "device": "cpu"}
    model = tp_layers.load(FluxTransformer2DModel, FOLDER, **how)
    wrong = tp_layers.load(FluxTransformer2DModel, FOLDER, plan=wrong_plan(model), **how)
    rank = dist.get_rank() if dist.is_initialized() else 0
    options.results.mkdir(parents=True, exist_ok=True)
    torch.save({"digits": draw(model), "wrong": draw(wrong)}, options.results / f"rank-{rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
