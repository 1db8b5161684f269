"""Outputs in registered memory, the buffer of a group, and what torch's operators are given; all of it faked."""

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import _symmetric_memory

from fake_ways import FakeWays, table
from seeded import integers
from tp_layers import RowwiseLinear, registered, symmetric
from tp_layers.group import CPU, Group
from tp_layers.layers.options import Options
from tp_layers.layers.overlap import Overlap


def outputs(group: Group, overlap: Any, options: Options, grad: bool) -> tuple[list[str], bool]:
    """Three outputs of a layer of 4096 bytes, alive at once."""
    full = nn.Linear(8, 16)
    with torch.no_grad():
        full.weight.copy_(integers(16, 8, seed=1))
        full.bias.copy_(integers(16, seed=2))
    layer = RowwiseLinear.from_linear(full, group=group, options=options)
    layer.overlap = overlap
    inputs = [integers(4, 16, 8, seed=seed) for seed in (3, 4, 5)]
    with FakeWays(table(group.size)) as fake, torch.set_grad_enabled(grad):
        found = [layer(layer.features.take(x, group.rank, group.size)) for x in inputs]
    return fake.calls, all(torch.equal(y, full(x)) for x, y in zip(inputs, found, strict=True))


LAYERS = {
    "whole": (None, Options(), False, ["memory", "own"]),
    "put off": (Overlap(1, later=True), Options(), False, ["memory"]),
    # By the length of a chunk: of 2048 bytes no window says that memory matters.
    "in chunks": (Overlap(2), Options(), False, ["own", "own"]),
    "differentiated": (None, Options(), True, ["own"]),
    # 8192 bytes then.
    "in float64": (None, Options(reduce_dtype=torch.float64), False, ["own"]),
}


@pytest.mark.parametrize("case", LAYERS)
def test_outputs_are_in_registered_memory_where_a_window_says_so(ranks, case):
    overlap, options, grad, calls = LAYERS[case]
    assert ranks(2, outputs, overlap, options, grad) == [(calls * 3, True)] * 2


def test_chunks_of_a_window_are_in_registered_memory(ranks):
    assert ranks(2, longer) == [["memory", "own", "memory", "own"]] * 2


def longer(group: Group) -> list[str]:
    layer = RowwiseLinear.from_linear(nn.Linear(8, 16), group=group)
    layer.overlap = Overlap(2)
    with FakeWays(table(group.size)) as fake, torch.no_grad():
        layer(torch.ones(128, layer.in_features))
    return fake.calls


# As `symmetric.py` calls them.
SCHEMAS = {
    "one_shot": "(Tensor symm_buffer, Tensor local_input, str reduce_op, str group_name, Tensor(a!) out)",
    "two_shot": "(Tensor(a!) input, str reduce_op, str group_name, Tensor(b!) output)",
    "multimem": "(Tensor(a!) input, str reduce_op, str group_name)",
}


@pytest.mark.parametrize("way", symmetric.SUMS)
def test_torchs_operators_take_what_they_are_given(way):
    name = symmetric._OPERATORS[way]
    assert symmetric.missing(way, 2) == ""
    assert str(getattr(torch.ops.symm_mem, name).default._schema).startswith(f"symm_mem::{name}{SCHEMAS[way]}")


class FakeBackend:
    """What NCCL's backend has, as far as it is used."""

    mem_allocator = "NCCL's allocator"

    def __init__(self) -> None:
        self.registered: list[Any] = []

    def register_mem_pool(self, pool: Any) -> None:
        self.registered.append(pool)

    def _get_backend(self, device: torch.device) -> "FakeBackend":
        return self


def test_a_pool_is_made_of_the_backends_memory_registered_and_used(monkeypatch):
    used: list[Any] = []

    @contextlib.contextmanager
    def use(pool: Any, device: torch.device) -> Iterator[None]:
        used.append((pool, device))
        yield
        used.append("left")

    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"a pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    backend: Any = FakeBackend()
    assert registered.missing(CPU, backend) == ""
    pool = registered.Pool(CPU, backend)
    assert backend.registered == ["a pool of NCCL's allocator"]
    x = pool.empty((2, 3), torch.bfloat16)
    assert (x.shape, x.dtype, used) == ((2, 3), torch.bfloat16, [("a pool of NCCL's allocator", CPU), "left"])
    monkeypatch.delattr(torch.cuda, "MemPool")
    assert registered.missing(CPU, backend).endswith("has no memory pools")


def test_the_buffer_of_a_group_is_symmetric_memory_that_its_ranks_have_met_at(monkeypatch):
    made: list[Any] = []

    def empty(nbytes: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        made.append(torch.empty(nbytes, dtype=dtype, device=device))
        return made[-1]

    def rendezvous(buffer: torch.Tensor, name: str) -> SimpleNamespace:
        assert buffer is made[0] and name == "the group"
        return SimpleNamespace(multicast_ptr=0)

    monkeypatch.setattr(_symmetric_memory, "empty", empty)
    monkeypatch.setattr(_symmetric_memory, "rendezvous", rendezvous)
    staging = symmetric.Staging(70, CPU, "the group")
    with torch.inference_mode():
        staging.allocate()
        staging.meet()
    assert made[0].numel() == 80 and not made[0].is_inference() and not staging.multicast


def test_torchs_operators_get_the_buffer_the_tensor_and_the_group(monkeypatch):
    seen = []

    def note(name: str) -> Callable[..., None]:
        return lambda *given: seen.append((name, [it if isinstance(it, str) else id(it) for it in given]))

    names = list(symmetric._OPERATORS.values())
    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace(**{name: note(name) for name in names}))
    buffer, x = torch.zeros(4), torch.ones(4)
    for run in symmetric.SUMS.values():
        run(buffer, x, "the group")
    # Two-shot and multimem read what was copied to the buffer; multimem leaves its sum there.
    assert torch.equal(buffer, x)
    assert seen == [
        (names[0], [id(buffer), id(x), "sum", "the group", id(x)]),
        (names[1], [id(buffer), "sum", "the group", id(x)]),
        (names[2], [id(buffer), "sum", "the group"]),
    ]
