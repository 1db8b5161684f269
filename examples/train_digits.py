"""Trains the FLUX transformer of `examples/digits` on scikit-learn's handwritten digits, by rectified flow matching.

    pip install '.[examples]'
    python examples/train_digits.py examples/digits

Some minutes on one CPU core, with the same weights each time on the same machine and versions.
"""

import argparse
import copy
import math
from pathlib import Path

import torch
from diffusers import FluxTransformer2DModel
from sklearn.datasets import load_digits
from torch import nn

from draw import CLASSES, PATCH, conditions, patches

CONFIG = {
    "patch_size": 1,
    "in_channels": PATCH**2,
    "num_layers": 2,
    "num_single_layers": 4,
    "attention_head_dim": 16,
    "num_attention_heads": 4,
    "joint_attention_dim": CLASSES + 1,
    "pooled_projection_dim": CLASSES + 1,
    "axes_dims_rope": (4, 6, 6),
}
BATCH, RATE = 128, 2e-3
# Of how many labels the model is not told, so that it learns what guidance compares with.
UNTOLD = 0.1
KEPT = 0.998


def train(steps: int, seed: int = 0) -> FluxTransformer2DModel:
    """A moving average of the weights over `steps` steps of AdamW."""
    torch.manual_seed(seed)
    digits = load_digits()
    pixels = patches(torch.tensor(digits.images, dtype=torch.float32) / 8 - 1)
    labels = torch.tensor(digits.target, dtype=torch.long)
    model = FluxTransformer2DModel(**CONFIG)
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.99), weight_decay=0.01)
    # Up for 100 steps, then down to nothing.
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 100) * (1 + math.cos(math.pi * step / steps)) / 2
    )
    for step in range(steps):
        chosen = torch.randint(len(pixels), (BATCH,))
        loss = flow_loss(model, pixels[chosen], labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        with torch.no_grad():
            kept = min(KEPT, step / (step + 10))
            for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(parameter, 1 - kept)
        if step % 100 == 0:
            print(f"step {step} of {steps}: loss {loss.item():.3f}", flush=True)
    return average.eval()


def flow_loss(model: FluxTransformer2DModel, pixels: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The squared error of the velocity from digits `[B, 16, 4]` to noise, at a random time of each."""
    noise, time = torch.randn_like(pixels), torch.randn(len(pixels)).sigmoid()
    at = time[:, None, None]
    told = torch.where(torch.rand(len(labels)) < UNTOLD, CLASSES, labels)
    (velocity,) = model((1 - at) * pixels + at * noise, timestep=time, **conditions(told), return_dict=False)
    return (velocity - (noise - pixels)).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the model is saved, in float16")
    parser.add_argument("--steps", type=int, default=3000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(options.steps).half().save_pretrained(options.folder)


if __name__ == "__main__":
    main()
