"""Draws a picture with FLUX.2 on several GPUs, or CPU ranks, each holding its own part of the transformer.

    torchrun --nproc-per-node 4 examples/flux2.py black-forest-labs/FLUX.2-dev --prompt "a lighthouse at dawn"

The repository, or a local folder, is one of FLUX.2 dev or klein. Each rank reads its shard of the transformer, and the
whole text encoder and VAE; rank 0 saves the picture. With `--diffusers` the transformer is loaded by diffusers' own
call, which `tp_layers.diffusers.enable()` lets this package carry out. Without torchrun, one process does it all.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, Flux2Transformer2DModel
from diffusers.models._modeling_parallel import TensorParallelConfig

import tp_layers


def join() -> torch.device:
    """Makes this process one of the ranks that torchrun started, and returns its device."""
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if on_gpu else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def load(repository: str, dtype: torch.dtype, own_call: bool) -> Flux2Transformer2DModel:
    """This rank's part of the transformer, on its device."""
    if not own_call:
        return tp_layers.load(Flux2Transformer2DModel, repository, subfolder="transformer", dtype=dtype)
    tp_layers.diffusers.enable()
    config = TensorParallelConfig(tp_degree=dist.get_world_size()) if dist.is_initialized() else None
    return Flux2Transformer2DModel.from_pretrained(
        repository, subfolder="transformer", torch_dtype=dtype, parallel_config=config
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("repository", help="an id on the hub, or a folder")
    parser.add_argument("--prompt", default="a lighthouse at dawn")
    parser.add_argument("--output", type=Path, default=Path("flux2.png"))
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--size", type=int, help="pixels of a side; the pipeline's own if left out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--diffusers", action="store_true", help="load by diffusers' own call")
    options = parser.parse_args()

    device, dtype = join(), getattr(torch, options.dtype)
    transformer = load(options.repository, dtype, options.diffusers)
    pipeline = DiffusionPipeline.from_pretrained(options.repository, transformer=transformer, torch_dtype=dtype)
    first = not dist.is_initialized() or dist.get_rank() == 0
    pipeline.set_progress_bar_config(disable=not first)
    image = pipeline.to(device)(
        prompt=options.prompt,
        num_inference_steps=options.steps,
        height=options.size,
        width=options.size,
        # The same on every rank: each draws the whole picture.
        generator=torch.Generator().manual_seed(options.seed),
    ).images[0]
    if first:
        image.save(options.output)
        held = sum(parameter.nbytes for parameter in transformer.parameters()) / 1e9
        print(f"saved {options.output}; of the transformer this rank held {held:.3g} GB")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
