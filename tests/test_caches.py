"""diffusers' step caches on a sharded model: they skip what they skip on a whole one, and give the same outputs.

A rank that skipped a step which another computes would leave that one waiting in a collective.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.hooks import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    TextKVCacheConfig,
)
from torch import nn
from torch.overrides import TorchFunctionMode

import tp_layers
from close import FLOAT32, relative_error
from families import REGISTERED, Family, digest, run
from families.family import noise
from tp_layers.group import Group

STEPS = 7
FLUX, FLUX2 = "FluxTransformer2DModel", "Flux2Transformer2DModel"
QWEN, WAN = "QwenImageTransformer2DModel", "WanTransformer3DModel, text to video"
NUCLEUS = "NucleusMoEImageTransformer2DModel"


class Clock:
    """The timestep of the current step, as a pipeline has it."""

    now = 0


def first_block() -> Any:
    return FirstBlockCacheConfig(threshold=0.1)


def taylor_seer(**how: Any) -> Any:
    return TaylorSeerCacheConfig(
        cache_interval=3, disable_cache_before_step=2, taylor_factors_dtype=torch.float32, **how
    )


def taylor_seer_lite() -> Any:
    return taylor_seer(use_lite_mode=True)


def taylor_seer_of_wan() -> Any:
    # Its attentions have other names than diffusers looks for; `to_v` is a layer of this package.
    return taylor_seer(cache_identifiers=[r"blocks\.\d+\.attn1", r"blocks\.\d+\.attn2\.to_v"])


def mag() -> Any:
    return MagCacheConfig(mag_ratios=[1.0, 1.01, 0.99, 1.02, 0.98, 1.01, 1.0], num_inference_steps=STEPS)


def pyramid() -> Any:
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2,
        cross_attention_block_skip_range=3,
        current_timestep_callback=lambda: Clock.now,
    )


def faster() -> Any:
    return FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 900),
        current_timestep_callback=lambda: Clock.now,
        is_guidance_distilled=True,
    )


def faster_with_guidance() -> Any:
    # The batch is an unconditional and a conditional image; the former is mostly guessed from the latter.
    return FasterCacheConfig(
        unconditional_batch_timestep_skip_range=(-1, 900),
        unconditional_batch_skip_range=3,
        current_timestep_callback=lambda: Clock.now,
    )


def sea() -> Any:
    return SeaCacheConfig(threshold=0.5, raw_vision_callback=lambda _, args, inputs: [*inputs["hidden_states"]])


def text_keys() -> Any:
    return TextKVCacheConfig()


# A cache, and models that diffusers' code for it takes.
CASES = [
    *[(first_block, label) for label in (FLUX, QWEN, WAN)],
    *[(taylor_seer, label) for label in (FLUX, FLUX2, QWEN)],
    *[(taylor_seer_lite, label) for label in (FLUX, FLUX2, QWEN, WAN)],
    (taylor_seer_of_wan, WAN),
    *[(mag, label) for label in (FLUX, FLUX2, QWEN, WAN)],
    *[(pyramid, label) for label in (FLUX, FLUX2, QWEN, WAN)],
    *[(faster, label) for label in (FLUX, QWEN)],
    (faster_with_guidance, WAN),
    (sea, WAN),
    (text_keys, NUCLEUS),
]


class Work(TorchFunctionMode):
    """Counts the attentions that are computed within, and the layers of `model` that make keys of a text."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.count = 0
        for name, module in model.named_modules():
            if name.endswith("add_k_proj"):
                module.register_forward_hook(self.add)

    def add(self, *_: Any) -> None:
        self.count += 1

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func is nn.functional.scaled_dot_product_attention
        return func(*args, **(kwargs or {}))


def denoise(model: nn.Module, family: Family) -> tuple[list[torch.Tensor], list[int]]:
    """The output of every step, whose inputs change more and more, and how much of its work each did."""
    inputs, outputs, counts, work = family.inputs(), [], [], Work(model)
    drift = noise(*inputs["hidden_states"].shape, seed=9)
    for step in range(STEPS):
        Clock.now = 1000 - 100 * step
        moved = inputs | {"hidden_states": inputs["hidden_states"] + 0.01 * 1.6**step * drift}
        position = {"step_index": step, "sigma": 1 - step / STEPS, "num_inference_steps": STEPS}
        before = work.count
        with model.cache_context("cond", **position), work:
            outputs.append(run(model, moved)[0])
        counts.append(work.count - before)
    return outputs, counts


def cached(
    group: Group | None, config: Callable[[], Any], label: str, before: bool = False
) -> tuple[list[torch.Tensor], list[int]]:
    """`denoise` with a cache, of a model sharded over `group`, or whole; the cache enabled `before` sharding."""
    family = REGISTERED[label]
    model = family.build()
    if before:
        model.enable_cache(config())
    if group is not None:
        tp_layers.apply(model, group=group)
    if not before:
        model.enable_cache(config())
    return denoise(model, family)


def on_rank(group: Group, *case: Any) -> tuple[list[torch.Tensor], list[int], int]:
    outputs, counts = cached(group, *case)
    return outputs, counts, digest(outputs)


@pytest.mark.parametrize(("config", "label"), CASES, ids=[f"{config.__name__}-{label}" for config, label in CASES])
def test_a_cache_does_on_ranks_what_it_does_on_one(ranks, config, label):
    wanted, counts = cached(None, config, label)
    found = ranks(2, on_rank, config, label)
    assert len({bits for *_, bits in found}) == 1
    assert [skipped for _, skipped, _ in found] == [counts, counts]
    for got, full in zip(found[0][0], wanted, strict=True):
        assert relative_error(got, full) <= FLOAT32
    assert min(counts) < counts[0]


@pytest.mark.parametrize("config", [first_block, taylor_seer], ids=lambda config: config.__name__)
def test_a_cache_may_be_enabled_before_sharding(ranks, config):
    wanted, counts = cached(None, config, FLUX)
    for got, skipped, _ in ranks(2, on_rank, config, FLUX, True):
        assert skipped == counts
        assert max(relative_error(a, b) for a, b in zip(got, wanted, strict=True)) <= FLOAT32
