"""What GPUs compute and communicate in a second: from data sheets, by name, or measured on the ranks that are here.

A rate is what is achieved, which for those by name is a part of what is advertised:

    flops       `GEMM` of the dense peak in bfloat16, as of a large cuBLAS product at the clocks that power allows
    bandwidth   `STREAM` of the peak, as of a product of one row, which reads the weights once
    link        of one direction of a rank's links, the part that a large all-reduce moves (NCCL's "bus bandwidth")

Data sheets are NVIDIA's of each product. The parts, the latencies and everything between nodes are assumptions.
"""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from .exchange import largest
from .failure import protect
from .group import Group
from .launch import Ranks
from .rates import Rates, measure

GEMM, STREAM = 0.7, 0.85
HALVES = (torch.bfloat16, torch.float16)
MEASURED = "measured"
# Of the products that are timed, so that a GPU is busy and a CPU soon done: rows, width.
ON_GPU, ON_CPU = (4096, 8192), (256, 1024)
WIDE = 4096


@dataclass(frozen=True)
class Hardware:
    """A kind of GPU and how its nodes are joined.

    `memory` in bytes; `flops` of a GEMM in `dtypes`; `bandwidth` of the memory in bytes/s; `per_node` GPUs of one node;
    `latency` of the shortest all-reduce within a node, in seconds, and `link` bytes/s that a rank sends in a long one;
    `latency_between`, in addition, and `link_between` of a whole node, between nodes. `weights`, `hidden` and `further`
    are those of `Rates`, which only a measurement tells.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    per_node: int
    latency: float
    link: float
    latency_between: float
    link_between: float
    dtypes: tuple[torch.dtype, ...] = HALVES
    weights: float = math.inf
    hidden: float = 1.0
    further: float | None = None

    def nodes(self, size: int) -> int:
        """How many nodes `size` ranks take."""
        return math.ceil(size / self.per_node)

    def rates(self, size: int) -> Rates:
        """Of `size` ranks. A ring of n ranks sends 2 (n - 1) / n of the tensor over each link, and so do n nodes."""
        nodes, near = self.nodes(size), min(size, self.per_node)
        seconds = _ring(near) / self.link + _ring(nodes) / self.link_between
        latency = (near > 1) * self.latency + (nodes > 1) * self.latency_between
        transfer = 1 / seconds if seconds else math.inf
        return Rates(self.flops, latency, transfer, self.weights, self.hidden, self.further)


def _ring(members: int) -> float:
    return 2 * (members - 1) / members


def _sheet(
    name: str,
    memory: float,
    teraflops: float,
    bandwidth: float,
    link: float,
    between: float,
    per_node: int = 8,
    latency: float = 15e-6,
) -> Hardware:
    """Advertised gigabytes, dense bfloat16 teraflops and gigabytes/s; what a link and a node's network achieve."""
    return Hardware(
        name, memory * 1e9, GEMM * teraflops * 1e12, STREAM * bandwidth * 1e9, per_node, latency, link * 1e9, 30e-6,
        between * 1e9,
    )  # fmt: skip


# Over NVLink 0.8 of a direction; between nodes 0.7 of a network card for each GPU, of 400 Gbit/s (A100: 200).
# Over PCIe 4.0 x16 (32 GB/s) 0.6, or 0.35 where GPUs cannot reach each other's memory, and go through the host's;
# between nodes 0.8 of one card of 100 Gbit/s.
HARDWARE = {
    it.name: it
    for it in (
        _sheet("A100", 80, 312, 2039, 0.8 * 300, 0.7 * 8 * 25),  # SXM, 80 GB: NVLink 600 GB/s both ways
        _sheet("H100", 80, 989.4, 3350, 0.8 * 450, 0.7 * 8 * 50),  # SXM: NVLink 900 GB/s both ways
        _sheet("H200", 141, 989.4, 4800, 0.8 * 450, 0.7 * 8 * 50),  # SXM: as H100
        _sheet("B200", 180, 2250, 7700, 0.8 * 900, 0.7 * 8 * 50),  # HGX: NVLink 1,800 GB/s both ways
        _sheet("L40S", 48, 362, 864, 0.6 * 32, 0.8 * 12.5, latency=25e-6),
        _sheet("RTX4090", 24, 165.2, 1008, 0.35 * 32, 0.8 * 12.5, per_node=4, latency=40e-6),
    )
}


def named(name: str) -> Hardware:
    """The hardware of this name, in letters of any case.

    Raises:
        ValueError: there is none.
    """
    found = {known.lower(): it for known, it in HARDWARE.items()}.get(name.lower())
    if found is None:
        raise ValueError(f"no hardware is called '{name}'; there are {', '.join(HARDWARE)}, and '{MEASURED}'")
    return found


def measured(sizes: Sequence[int], dtype: torch.dtype) -> dict[int, Hardware]:
    """What `sizes` ranks do, measured in `dtype`, by size: on the default process group, or on CPU ranks started here.

    Under a process group all its ranks call it, and a rank gets the sizes of which it is one; rank 0 gets all. A group
    over several nodes is measured as it is, as if it were one.

    Raises:
        ValueError: a size is larger than the process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        with Ranks(max(sizes)) as ranks:
            return {size: ranks.run(measured_on, dtype, size=size)[0] for size in sizes}
    everyone = Group.of(None)
    if max(sizes) > everyone.size:
        raise ValueError(f"{max(sizes)} ranks cannot be measured, there are {everyone.size}")
    groups = {size: dist.new_group(list(range(size))) for size in sizes}
    return {size: measured_on(Group.of(groups[size]), dtype) for size in sizes if everyone.rank < size}


def measured_on(group: Group, dtype: torch.dtype) -> Hardware:
    """What the ranks of `group` do, all of which call it."""
    # Over a process group of its own, as a sharded model talks.
    group = protect(group)
    size, on_cpu = group.size, group.device.type == "cpu"
    rows, width = ON_CPU if on_cpu else ON_GPU
    rates, bandwidth = measure(group, dtype, width=width, rows=rows), _bandwidth(group, dtype)
    link = _ring(size) * rates.transfer if size > 1 else math.inf
    return Hardware(
        f"{MEASURED} ({group.device.type})", _memory(group), rates.flops, bandwidth, size, rates.latency, link, 0.0,
        math.inf, (dtype,), rates.weights, rates.hidden, rates.further,
    )  # fmt: skip


def _bandwidth(group: Group, dtype: torch.dtype) -> float:
    """Bytes/s of a product of one row on the slowest rank, all ranks at it."""
    weight = torch.ones(WIDE, WIDE, dtype=dtype, device=group.device)
    x, seconds = weight[:1].contiguous(), []
    for _ in range(6):
        largest(torch.zeros(1, device=group.device), group)
        _finish(group)
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        _finish(group)
        seconds.append(time.perf_counter() - start)
    slowest = largest(torch.tensor(seconds[1:], dtype=torch.float64, device=group.device), group)
    return weight.nbytes / median(slowest.tolist())


def _finish(group: Group) -> None:
    if group.device.type != "cpu":
        torch.accelerator.synchronize(group.device)


def _memory(group: Group) -> float:
    """Bytes of this rank's GPU, or its part of the host's."""
    if group.device.type == "cuda":
        return float(torch.cuda.get_device_properties(group.device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / group.size
