"""Denoises random latents with a FLUX.2 transformer; one rank of `examples/demo.py`, or alone.

    torchrun --nproc-per-node 2 examples/denoise.py CHECKPOINT RESULTS
    python examples/denoise.py CHECKPOINT RESULTS

Each rank writes `RESULTS/rank-N.pt`: the latents, and what loading cost.
"""

import argparse
import os
import re
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Transformer2DModel

import tp_layers

IMAGE_SIDE, TEXT_TOKENS = 8, 16
# These stay exact in bfloat16 when the model multiplies them by 1000, so that dtypes differ in arithmetic alone.
SIGMAS = [1.0, 0.5, 0.25, 0.125]


def resident_bytes(field: str) -> int:
    """Bytes of memory this process occupies now (`VmRSS`), or occupied at most so far (`VmHWM`)."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status)[1]) * 1024


def denoise(model: Flux2Transformer2DModel, dtype: torch.dtype) -> torch.Tensor:
    """Latents `[1, IMAGE_SIDE ** 2, channels]` after one step for each of SIGMAS, float32."""
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, IMAGE_SIDE**2, model.config.in_channels, generator=generator)
    text = torch.randn(1, TEXT_TOKENS, model.config.joint_attention_dim, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(IMAGE_SIDE), torch.arange(IMAGE_SIDE), indexing="ij")
    zero = torch.zeros_like(rows)
    image_ids = torch.stack([zero, rows, columns, zero], -1).flatten(0, 1)
    text_ids = torch.zeros(TEXT_TOKENS, 4, dtype=torch.long)
    text_ids[:, 3] = torch.arange(TEXT_TOKENS)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=SIGMAS)
    for timestep in scheduler.timesteps:
        with torch.no_grad():
            (velocity,) = model(
                hidden_states=latents.to(dtype),
                encoder_hidden_states=text.to(dtype),
                timestep=timestep[None] / 1000,
                guidance=torch.tensor([4.0]),
                img_ids=image_ids,
                txt_ids=text_ids,
                return_dict=False,
            )
        (latents,) = scheduler.step(velocity.float(), timestep, latents, return_dict=False)
    return latents


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("results", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)

    before = resident_bytes("VmRSS")
    model, report = tp_layers.load(Flux2Transformer2DModel, options.checkpoint, dtype=dtype, device="cpu", report=True)
    cost = {
        "held": report.bytes_held,
        "full": tp_layers.describe(model).full_bytes,
        "read": report.bytes_read,
        "peak": resident_bytes("VmHWM") - before,
        "seconds": report.seconds,
    }
    options.results.mkdir(parents=True, exist_ok=True)
    torch.save({"latents": denoise(model, dtype), **cost}, options.results / f"rank-{report.rank}.pt")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
