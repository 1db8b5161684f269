"""A thousand forwards of a sharded model leave the memory, and the objects alive, of the first ones."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers.models.activations import SwiGLU
from torch import nn

import tp_layers
from close import randomise
from memory import resident_bytes
from seeded import noise
from tp_layers import PackedColwiseParallel
from tp_layers.collectives import all_reduce
from tp_layers.group import Group
from tp_layers.layers.fused import FusedProjection
from tp_layers.layers.low_rank import Adaptable, LowRank
from tp_layers.under_way import all_reduce_later

ROWS, WIDTH = 32, 64
WARM_UP = 50
# Of 1,000 forwards together; one output kept from each makes 8.2 MB, and more where it has a neighbour that was freed.
# Without a leak 0.1 MB was seen.
MOST_BYTES = 4_000_000
# Collectives of which torch keeps a record, in 5 MB; after so many the first ones are forgotten.
RECORDED = 2000
# That the garbage collector knows; without a leak one was seen.
MOST_OBJECTS = 50


class Block(nn.Module):
    """Packed, colwise, a norm over both ranks' parts, rowwise; of two `streams` the first is put off for the second."""

    def __init__(self, streams: int):
        super().__init__()
        self.packed, self.colwise = SwiGLU(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH)
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.to_add_out = nn.Linear(WIDTH, WIDTH) if streams > 1 else None

    def forward(self, x):
        h = self.norm(self.packed(x) + self.colwise(x))
        first = self.to_out[0](h)
        return first if self.to_add_out is None else self.to_add_out(h) + first


PLAN = {
    "packed.proj": PackedColwiseParallel([1, 1]),
    "colwise": "colwise",
    "norm": "rms_norm",
    "to_out.0": "rowwise",
    "to_add_out?": "rowwise",
}
# A leak of either of two that go together is seen in both.
MODES: dict[str, dict[str, Any]] = {
    "plain": dict(fuse=False),
    "fused": dict(fuse=True),
    "in chunks, reduced in float32": dict(overlap=2, reduce_dtype=torch.float32),
    "put off, with an adapter": dict(overlap=1),
    "in rank order": dict(deterministic=True),
}


def sharded(group: Group, mode: str) -> tuple[nn.Module, torch.Tensor]:
    """A model and its input. What is reduced in float32 must be of another dtype."""
    dtype = torch.bfloat16 if "float32" in mode else torch.float32
    model = randomise(Block(2 if "put off" in mode else 1)).to(dtype)
    tp_layers.apply(model, PLAN, group=group, **MODES[mode])
    overlap = model.to_out[0].overlap
    assert isinstance(model.packed, FusedProjection) == (mode == "fused")
    assert (overlap is not None and overlap.later) == ("put off" in mode)
    layers = [module for module in model.modules() if isinstance(module, Adaptable)]
    for layer in layers if "adapter" in mode else []:
        rows, columns = (layer.spec.length if layer.spec.dim == dim else layer.weight.shape[dim] for dim in (0, 1))
        lora = LowRank(noise(4, columns), noise(rows, 4), None, 0.1)
        layer.adapters["one"] = lora.shard(layer.spec, group).like(layer.weight)
    return model, noise(ROWS, WIDTH, seed=1, dtype=dtype)


def held() -> tuple[int, int, int]:
    """Bytes of this process, objects, and reductions that torch holds until somebody waits for them."""
    gc.collect()
    return resident_bytes(), len(gc.get_objects()), torch._C._distributed_c10d._get_work_registry_size()


def keep_outputs(model: nn.Module, group: Group) -> Callable[[], None]:
    kept = []
    model.register_forward_hook(lambda module, args, output: kept.append(output))
    return kept.clear


def start_sums(model: nn.Module, group: Group) -> Callable[[], None]:
    """Whose results nobody reads; torch holds them, until what is returned waits for them."""
    started = []

    def start(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        own = output.clone()
        all_reduce_later(own, group)
        started.append(weakref.ref(own))

    def finish() -> None:
        for own in started:
            torch.ops._c10d_functional.wait_tensor(own())

    model.register_forward_hook(start)
    return finish


def grown(group: Group, mode: str, forwards: int, leak: Any) -> list[int]:
    """By how much this rank holds more after so many forwards, with a `leak`; last, what is unfinished afterwards."""
    model, x = sharded(group, mode)
    stop = leak(model, group) if leak else lambda: None
    with torch.no_grad():
        for _ in range(RECORDED):
            all_reduce(torch.zeros(1, 1), model.to_out[0].group)
        for _ in range(WARM_UP):
            model(x)
        before = held()
        for _ in range(forwards):
            model(x)
        after = held()
        stop()
    return [*(now - then for now, then in zip(after, before, strict=True)), held()[-1]]


@pytest.mark.parametrize("mode", MODES)
def test_forwards_leave_no_memory_behind(ranks, mode):
    for nbytes, objects, unfinished, still in ranks(2, grown, mode, 1000, None):
        assert nbytes < MOST_BYTES and objects < MOST_OBJECTS and unfinished == still == 0


@pytest.mark.parametrize("leak", [keep_outputs, start_sums], ids=["outputs", "sums that nobody reads"])
def test_a_leak_is_seen(ranks, leak):
    for nbytes, objects, unfinished, still in ranks(2, grown, "plain", 600, leak):
        assert nbytes > MOST_BYTES and objects > 600 - MOST_OBJECTS
        assert unfinished == (600 if leak is start_sums else 0) and still == 0
