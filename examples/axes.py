"""Draws digits on four ranks: tensor parallelism on one axis of a 2 x 2 mesh, and another kind on the other.

    torchrun --nproc-per-node 4 examples/axes.py

    context     each tensor-parallel pair has half of the tokens: diffusers' context parallelism, by Ulysses
    guidance    one pair predicts with the condition, the other without, and they exchange what they predict

The ranks have a GPU each, or are CPU processes where there is none. Prints how far each way's digits are from those of
one rank, and exits with 1 if that is more than rounding explains, or if the ranks' digits differ in a bit.
"""

import contextlib
import sys
from collections.abc import Callable
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tp_layers
from draw import CLASSES, FOLDER, GUIDANCE, PATCH, SIDE, STEPS, conditions, images
from flux2 import join

# From tokens [10, 16, 4] and the time to the velocity of the tokens with a condition, and without, both of that shape.
Predict = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
DIGITS, NONE = torch.arange(CLASSES), torch.full((CLASSES,), CLASSES)
# Norm of the difference over norm, after all steps.
MOST = 1e-6


def velocity(
    model: FluxTransformer2DModel, tokens: torch.Tensor, time: torch.Tensor, labels: torch.Tensor
) -> torch.Tensor:
    """The model's prediction for tokens `[B, 16, 4]` at one time, given `labels [B]`."""
    inputs = conditions(labels)
    # Twice the one token of text: two ranks can split them.
    inputs["encoder_hidden_states"] = inputs["encoder_hidden_states"].repeat(1, 2, 1)
    inputs["txt_ids"] = inputs["txt_ids"].repeat(2, 1)
    on_device = {name: value.to(tokens.device) for name, value in inputs.items()}
    return model(tokens, timestep=time.expand(len(tokens)), **on_device, return_dict=False)[0]


def in_one_batch(model: FluxTransformer2DModel) -> Predict:
    """Both predictions by the same ranks."""

    def predict(tokens: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        digit, none = velocity(model, torch.cat([tokens, tokens]), time, torch.cat([DIGITS, NONE])).chunk(2)
        return digit, none

    return predict


def one_each(model: FluxTransformer2DModel, axis: DeviceMesh) -> Predict:
    """One prediction by each of the two ranks of `axis`, which then exchange them."""
    labels = (DIGITS, NONE)[axis.get_local_rank()]

    def predict(tokens: torch.Tensor, time: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = velocity(model, tokens, time, labels).contiguous()
        digit, none = torch.empty_like(own), torch.empty_like(own)
        dist.all_gather([digit, none], own, group=axis.get_group())
        return digit, none

    return predict


@torch.no_grad()
def draw(predict: Predict, device: torch.device) -> torch.Tensor:
    """The digits 0 to 9, `[10, 8, 8]`."""
    tokens = torch.randn(CLASSES, (SIDE // PATCH) ** 2, PATCH**2, generator=torch.Generator().manual_seed(7)).to(device)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(STEPS)
    for timestep in scheduler.timesteps:
        digit, none = predict(tokens, timestep.to(device) / 1000)
        (tokens,) = scheduler.step(none + GUIDANCE * (digit - none), timestep, tokens, return_dict=False)
    return images(tokens)


def load(group: DeviceMesh, device: torch.device) -> FluxTransformer2DModel:
    """This rank's part of the transformer."""
    return tp_layers.load(FluxTransformer2DModel, FOLDER, group=group, dtype=torch.float32, device=device)


def with_context(device: torch.device) -> Predict:
    """Tokens split over the axis `ulysses`, weights over `tp`."""
    mesh = init_device_mesh(device.type, (1, 2, 2), mesh_dim_names=("ring", "ulysses", "tp"))
    model = load(mesh["tp"], device)
    # diffusers divides by the number of accelerators, to number this rank's.
    one = patch("torch.accelerator.device_count", return_value=1) if device.type == "cpu" else contextlib.nullcontext()
    with one:
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2, mesh=mesh))
    return in_one_batch(model)


def with_guidance(device: torch.device) -> Predict:
    """The two predictions split over the axis `guidance`, weights over `tp`."""
    mesh = init_device_mesh(device.type, (2, 2), mesh_dim_names=("guidance", "tp"))
    return one_each(load(mesh["tp"], device), mesh["guidance"])


WAYS = {"context": with_context, "guidance": with_guidance}


def main() -> int:
    device = join()
    if not dist.is_initialized() or dist.get_world_size() != 4:
        raise SystemExit("four ranks, please: torchrun --nproc-per-node 4 examples/axes.py")
    whole = FluxTransformer2DModel.from_pretrained(FOLDER, torch_dtype=torch.float32).to(device)
    one = draw(in_one_batch(whole), device)
    wrong = False
    for name, way in WAYS.items():
        digits = draw(way(device), device)
        everyone = [torch.empty_like(digits) for _ in range(4)]
        dist.all_gather(everyone, digits)
        same = all(torch.equal(other, digits) for other in everyone)
        off = float((digits - one).norm() / one.norm())
        wrong |= off > MOST or not same
        if dist.get_rank() == 0:
            print(
                f"tp x {name}: {off:.1e} from one rank, the ranks {'bit-identical' if same else 'DIFFER'}", flush=True
            )
    dist.destroy_process_group()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
